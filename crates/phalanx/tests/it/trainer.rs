//! The trainer: its numbers against a closed form, its refusals.

use phalanx::ir::ops::UnaryKind;
use phalanx::ir::{Builder, DType, Init};
use phalanx::models::hf::{Params, Weights};
use phalanx::models::{Architecture, BatchShape, Chain, LocalForm, Mlp};
use phalanx::spmd::{Annotator, Costs, SpmdError};
use phalanx::{
    Automatic, Ddp, Fsdp, Megatron, NamedSchedule, Optimizer, StageSplit, Strategy, Table, Trainer,
    Zero,
};

fn line() -> Mlp {
    Mlp::regression(1, vec![], 1)
}

/// y = 3x − 1 at the four points ±1, ±2: a linear model finds it, by plain gradient descent.
fn table() -> Table {
    let x = vec![-2.0, -1.0, 1.0, 2.0];
    let y = x.iter().map(|x| 3.0 * x - 1.0).collect();
    Table::new(4).input("x", x).target("y", y)
}

#[test]
fn a_line_is_found_and_every_step_is_told() {
    let mut told = Vec::new();
    let report = Trainer::new(line())
        .data(table())
        .optimizer(Optimizer::sgd(0.0))
        .lr(0.1)
        .clip(None)
        .batch(4)
        .steps(100)
        .on_step(|taken| told.push(taken.step))
        .run()
        .unwrap();
    assert_eq!(told, (1..=100).collect::<Vec<_>>());
    let value = |name: &str| report.param(name).unwrap().to_f64()[0];
    let (weight, bias) = (value("layers.0.weight"), value("layers.0.bias"));
    assert!((weight - 3.0).abs() < 1e-4 && (bias + 1.0).abs() < 1e-4, "{weight}, {bias}");
}

/// The gradient of the mean of (wx + b − y)² at the first step, by hand.
#[test]
fn one_step_of_descent_is_its_formula() {
    let start = Trainer::new(line()).data(table()).batch(4).steps(0).run().unwrap();
    let value = |report: &phalanx::Report, name: &str| report.param(name).unwrap().to_f64()[0];
    let (w, b) = (value(&start, "layers.0.weight"), value(&start, "layers.0.bias"));
    let (mut dw, mut db) = (0.0, 0.0);
    for x in [-2.0, -1.0, 1.0, 2.0] {
        let error = w * x + b - (3.0 * x - 1.0);
        dw += 2.0 * error * x / 4.0;
        db += 2.0 * error / 4.0;
    }
    for parts in [1, 2] {
        let after = Trainer::new(line())
            .data(table())
            .optimizer(Optimizer::sgd(0.0))
            .lr(0.1)
            .clip(None)
            .batch(4)
            .microbatches(parts)
            .steps(1)
            .run()
            .unwrap();
        assert!((value(&after, "layers.0.weight") - (w - 0.1 * dw)).abs() < 1e-6);
        assert!((value(&after, "layers.0.bias") - (b - 0.1 * db)).abs() < 1e-6);
    }
}

#[test]
fn what_cannot_work_is_refused_with_a_remedy() {
    let told = |trainer: Trainer<'_>| trainer.run().unwrap_err().to_string();
    assert!(told(Trainer::new(line())).contains("Trainer::data"));
    let uneven = Trainer::new(line()).data(table()).batch(3).microbatches(2);
    assert!(told(uneven).contains("2 micro-batches"));
    let ragged = Table::new(4).target("y", vec![0.0; 3]);
    assert!(told(Trainer::new(line()).data(ragged)).contains("column `y` has 3 values"));
    let diverging = Trainer::new(line())
        .data(table())
        .optimizer(Optimizer::sgd(0.0))
        .clip(None)
        .batch(4)
        .lr(1e20);
    let error = diverging.run().unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("at step"), "{error}");
}

/// What docs/parallelism.md shows as a strategy of one's own.
struct Batch;

impl Strategy for Batch {
    fn name(&self) -> &'static str {
        "batch"
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        for value in ctx.boundaries() {
            ctx.shard(value, 0, "dp")?;
        }
        for param in ctx.params() {
            ctx.replicate(param.value, "dp")?;
        }
        Ok(())
    }
}

fn curve() -> Trainer<'static> {
    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8, 8], 1) };
    let trainer = Trainer::new(model).data(table()).batch(4).lr(1e-2).steps(8).threads(1);
    trainer.optimizer(Optimizer::sgd(0.0))
}

#[test]
fn a_strategy_of_ones_own_trains_as_one_rank_does() {
    let one = curve().run().unwrap();
    let many = curve().mesh("dp=4").strategy(Batch).run().unwrap();
    assert!(many.layout.starts_with("4 ranks, dp 4: batch"), "{}", many.layout);
    assert!(many.moved > 0);
    for (a, b) in one.losses.iter().zip(&many.losses) {
        assert!((a - b).abs() < 1e-5 * a, "{a} and {b}");
    }
}

/// Without a limit the search shares the batch; the training is that of one rank.
#[test]
fn what_the_search_finds_can_be_trained() {
    let mlp = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8, 8], 1) };
    let model = mlp.model(BatchShape { batch: 4, seq: 1 }, DType::F32).unwrap();
    let mesh = "dp=2".parse().unwrap();
    let found = Automatic::search(&model, &mesh, &Costs::default()).unwrap();
    assert!(found.seconds > 0.0 && found.memory > 0.0);
    let one = curve().run().unwrap();
    let many = Trainer::of_model(model).data(table()).lr(1e-2).steps(8).threads(1);
    let many = many.optimizer(Optimizer::sgd(0.0)).mesh("dp=2").strategy(found).run().unwrap();
    for (a, b) in one.losses.iter().zip(&many.losses) {
        assert!((a - b).abs() < 1e-5 * a, "{a} and {b}");
    }
}

#[test]
fn layouts_that_contradict_themselves_are_refused_with_both_sides() {
    let told = |trainer: Trainer<'_>| {
        let error = trainer.run().unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    };
    assert!(told(curve().mesh("dp=2 dp=2")).contains("axis `dp` appears twice"));
    let both = told(curve().mesh("dp=2").strategy(Ddp::default()).strategy(Zero::stage(1)));
    assert!(both.contains("`DDP` and `ZeRO-1` both say") && both.contains("keep one"), "{both}");
    let few = told(curve().mesh("dp=8").strategy(Ddp::default()));
    assert!(few.contains("a batch of 4 cannot be divided among the 8 ranks of `dp`"), "{few}");
    assert!(few.contains("nearest that work: 4 ranks"), "{few}");
    let groups = Fsdp { shard: Some(3), ..Fsdp::default() };
    assert!(told(curve().mesh("dp=4").strategy(groups)).contains("a divisor of 4"));

    let b = Builder::new("line", DType::F32);
    let x = b.data("x", DType::F32, [4, 1]).annotate("0:dp");
    let w = b.param("w", [1, 2]).annotate("1:dp");
    let error = x.matmul(w).slice(1, 0, 1).squared_error(b.data("y", DType::F32, [4, 1]));
    b.loss("loss", error * b.scalar("inv_tokens"));
    let mut chain = Chain::new("line");
    chain.once(b, |_| Init::Normal(0.5)).unwrap();
    let model = Trainer::of_model(chain.finish()).data(table()).mesh("dp=2");
    let two = told(model.strategy(Ddp::default()));
    for words in ["`the model` wants", "`DDP` wants it replicated", "usual fix: drop one"] {
        assert!(two.contains(words), "{two}");
    }
}

/// Code for one of two ranks, with its sum written down, trains alike on ranks and on one, beside other axes too.
#[test]
fn a_segment_in_local_form_trains_like_any_other() {
    let trained = |mesh: &str| {
        let b = Builder::new("by hand", DType::F32);
        let local = LocalForm::new(&b, "tp", 2);
        let x = local.same(b.data("x", DType::F32, [4, 1]));
        let up = local.own_param("up", &[1, 3]).unwrap();
        let down = local.own_param("down", &[3, 1]).unwrap();
        let y = x.matmul(up).unwrap().unary(UnaryKind::Tanh).matmul(down).unwrap();
        let y = y.sum_ranks().and_then(|y| y.leave()).unwrap();
        let error = y.squared_error(b.data("y", DType::F32, [4, 1]));
        b.loss("loss", error * b.scalar("inv_tokens"));
        let mut chain = Chain::new("by hand");
        chain.once(b, |_| Init::Normal(0.5)).unwrap();
        let trainer = Trainer::of_model(chain.finish()).data(table()).lr(1e-2).steps(8).threads(1);
        match mesh {
            "" => trainer.run().unwrap(),
            "tp=2" => trainer.mesh(mesh).run().unwrap(),
            _ => trainer.mesh(mesh).strategy(Fsdp::default()).run().unwrap(),
        }
    };
    let one = trained("");
    assert_eq!(one.param("up").unwrap().shape, [2, 1, 3]);
    for mesh in ["tp=2", "dp=2 tp=2"] {
        let many = trained(mesh);
        assert_eq!(many.losses.len(), 8);
        for (a, b) in one.losses.iter().zip(&many.losses) {
            assert!((a - b).abs() < 1e-5 * a, "{mesh}: {a} and {b}");
        }
    }
}

#[test]
fn weights_are_saved_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("line.safetensors");
    for trainer in [curve(), curve().mesh("dp=2").strategy(Fsdp::default())] {
        let report = trainer.run().unwrap();
        report.save(&path).unwrap();
        let saved = Params::open(&path).unwrap();
        assert_eq!(saved.layouts().len(), report.params.len());
        for param in &report.params {
            let trained = report.param(&param.name).unwrap();
            assert_eq!(trained.shape, param.shape);
            assert_eq!(saved.read(&param.name).unwrap(), trained, "{}", param.name);
        }
        let unknown = report.param("layers.9.bias").unwrap_err().to_string();
        assert!(
            unknown.contains("`layers.9.bias`") && unknown.contains("layers.2.bias"),
            "{unknown}"
        );
    }
}

/// Chunks, splits of one's own and stages on meshes of different shape change who does what, not what
/// is learnt.
#[test]
fn stages_may_be_cut_and_shaped_in_any_way() {
    let trainer = || {
        let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8, 8, 8], 1) };
        let trainer = Trainer::new(model).data(table()).batch(4).microbatches(4).lr(0.05).steps(8);
        trainer.threads(1).strategy(Megatron::default())
    };
    let one = trainer().mesh("tp=1").run().unwrap();
    let uneven = StageSplit::Costs(vec![9.0, 1.0, 1.0, 1.0]);
    for (ranks, trainer) in [
        (2, trainer().mesh("pp=2 tp=1").schedule(NamedSchedule::Interleaved).chunks(2)),
        (2, trainer().mesh("pp=2 tp=1").schedule(NamedSchedule::ZbH1).split(uneven)),
        (
            6,
            trainer()
                .stage_meshes(["tp=2", "tp=4"])
                .schedule(NamedSchedule::GPipe)
                .split(StageSplit::Count),
        ),
    ] {
        let many = trainer.run().unwrap();
        assert!(many.layout.starts_with(&format!("{ranks} ranks")), "{}", many.layout);
        for (a, b) in one.losses.iter().zip(&many.losses) {
            assert!((a - b).abs() < 1e-4 * a, "{a} and {b} in {}", many.layout);
        }
    }
    let told = trainer().stage_meshes(["tp=2", "tp=none"]).run().unwrap_err().to_string();
    assert!(told.contains("none"), "{told}");
    let told = trainer()
        .mesh("pp=2 tp=1")
        .split(StageSplit::Costs(vec![1.0]))
        .run()
        .unwrap_err()
        .to_string();
    assert!(told.contains("1 costs for the 4 instances"), "{told}");
}

#[test]
fn more_ranks_than_a_process_can_have_are_refused() {
    for mesh in ["dp=1025", "dp=100000000"] {
        let trainer = Trainer::new(line()).data(table()).mesh(mesh).batch(4).steps(1);
        assert_eq!(trainer.run().unwrap_err().exit_code(), 2);
    }
}
