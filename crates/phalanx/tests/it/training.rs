//! A training that stays in memory, and a loop of one's own: the same under every strategy.

use std::ops::ControlFlow;

use phalanx::{
    Ddp, Fsdp, Llama, LlamaSpec, MarkovCorpus, Megatron, Mistake, Mlp, NamedSchedule, Optimizer,
    RopeScaling, RopeSpec, Stepper, Table, Trainer, Training, UnaryKind, Zero,
};

/// z = x² on `count` points.
fn curve(count: usize) -> Table {
    let x: Vec<f32> = (0..count).map(|i| 2.0 * i as f32 / count as f32 - 1.0).collect();
    let y = x.iter().map(|x| x * x).collect();
    Table::new(count).input("x", x).target("y", y)
}

fn trainer() -> Trainer<'static> {
    let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8, 8], 1) };
    let trainer = Trainer::new(model).batch(16).microbatches(4).lr(0.05).threads(1);
    trainer.optimizer(Optimizer::sgd(0.9))
}

type Layout = (&'static str, fn(Trainer<'static>) -> Trainer<'static>);

/// Layouts of every kind: replicas, shards, split tensors, stages, and all at once.
const LAYOUTS: &[Layout] = &[
    ("dp=1", |t| t),
    ("dp=2", |t| t.strategy(Ddp::default())),
    ("dp=2", |t| t.strategy(Zero::stage(1))),
    ("dp=2", |t| t.strategy(Zero::stage(3))),
    ("dp=2", |t| t.strategy(Fsdp::default())),
    ("dp=2 tp=2", |t| t.strategy(Ddp::default()).strategy(Megatron::default())),
    ("pp=2", |t| t.schedule(NamedSchedule::ZbH1)),
    ("dp=2 tp=2 pp=2", |t| t.strategy(Zero::stage(3)).strategy(Megatron::default())),
];

fn near(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-4 * a.abs().max(1e-2), "{what}: {a} and {b}");
}

#[test]
fn it_stops_and_goes_on_as_if_it_had_not_stopped() {
    let whole = trainer().data(curve(16)).steps(20).run().unwrap();
    let mut training = trainer().data(curve(16)).build().unwrap();
    assert_eq!(training.fit(8).unwrap(), &whole.losses[..8]);
    training.evaluate(curve(5)).unwrap();
    assert_eq!(training.fit(12).unwrap(), &whole.losses[8..]);
    assert_eq!((training.steps(), training.losses()), (20, &whole.losses[..]));
    let name = "layers.1.weight";
    assert_eq!(training.param(name).unwrap(), whole.param(name).unwrap());
}

/// 13 rows are no multiple of a micro-batch, which has 4.
#[test]
fn every_layout_evaluates_and_predicts_like_one_rank() {
    let (data, held_out) = (curve(16), curve(13));
    let mut alone: Option<(f64, Vec<f64>)> = None;
    for (mesh, strategies) in LAYOUTS {
        let mut training = strategies(trainer().data(&data).mesh(mesh)).build().unwrap();
        training.fit(20).unwrap();
        let told = training.evaluate(&held_out).unwrap();
        assert_eq!((told.after_step, told.count, told.accuracy), (20, 13, None));
        let found = training.predict(&held_out).unwrap();
        assert_eq!(found["prediction"].shape, [13, 1]);
        let found = found["prediction"].to_f64();
        let wanted = (0..13).map(|i| (2.0 * f64::from(i) / 13.0 - 1.0).powi(2));
        let errors = found.iter().zip(wanted).map(|(y, wanted)| (y - wanted).powi(2));
        near(told.loss, errors.sum::<f64>() / 13.0, mesh);
        let (loss, predicted) = alone.get_or_insert((told.loss, found.clone()));
        near(*loss, told.loss, mesh);
        predicted.iter().zip(&found).for_each(|(a, b)| near(*a, *b, mesh));
    }
}

/// Saved under one layout, the weights load under every other.
#[test]
fn weights_go_from_any_layout_to_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let data = curve(16);
    let build = |(mesh, strategies): &Layout| strategies(trainer().data(&data).mesh(mesh));
    let mut first = build(&LAYOUTS[7]).build().unwrap();
    first.fit(5).unwrap();
    first.save(&path).unwrap();
    let loss = first.evaluate(&data).unwrap().loss;
    for layout in LAYOUTS {
        let mut other = build(layout).seed(9).build().unwrap();
        assert!((other.evaluate(&data).unwrap().loss - loss).abs() > 1e-3);
        other.load(&path).unwrap();
        near(loss, other.evaluate(&data).unwrap().loss, layout.0);
        let mut started = build(layout).start_from(&path).build().unwrap();
        near(loss, started.evaluate(&data).unwrap().loss, layout.0);
        let name = "layers.2.weight";
        let values: Vec<f32> = (0..8).map(|i| i as f32).collect();
        started.set_param(name, &values).unwrap();
        assert_eq!(started.param(name).unwrap().to_f32(), values, "{}", layout.0);
        started.fit(1).unwrap();
        assert_ne!(started.param(name).unwrap().to_f32(), values, "{}", layout.0);
    }
    let wider = Trainer::new(Mlp::regression(1, [9, 8], 1)).batch(4).start_from(&path).build();
    let error = wider.err().unwrap();
    assert!(matches!(error.cause(), Some(Mistake::OtherShape { .. })), "{error}");
    let deeper = Trainer::new(Mlp::regression(1, [8, 8, 8], 1)).batch(4).start_from(&path).build();
    let error = deeper.err().unwrap();
    assert!(matches!(
        error.cause(),
        Some(Mistake::MissingParam { .. } | Mistake::OtherShape { .. })
    ));
}

/// The batch is the whole table, so a loop of one's own sees the same samples, in another order.
#[test]
fn a_loop_of_ones_own_trains_like_the_trainer() {
    let parts: Vec<Table> = (0..4)
        .map(|part| {
            let x: Vec<f32> = (0..4).map(|i| 2.0 * (4 * part + i) as f32 / 16.0 - 1.0).collect();
            let y = x.iter().map(|x| x * x).collect();
            // Columns in any order.
            Table::new(4).target("y", y).input("x", x)
        })
        .collect();
    let whole = trainer().data(curve(16)).steps(6).run().unwrap();
    for (mesh, strategies) in LAYOUTS {
        let mut stepper: Stepper<'_> = strategies(trainer().mesh(mesh)).stepper().unwrap();
        for expected in &whole.losses {
            let mut sum = 0.0;
            for (number, part) in parts.iter().enumerate() {
                assert_eq!((stepper.waiting(), stepper.step(0.05).unwrap()), (number, None));
                sum += stepper.forward(part).unwrap();
                stepper.backward().unwrap();
            }
            let update = stepper.step(0.05).unwrap().expect("the boundary is reached");
            near(update.loss, *expected, mesh);
            near(sum / 4.0, *expected, mesh);
        }
        assert_eq!(stepper.training().steps(), 6);
        let told = stepper.backward().unwrap_err();
        assert_eq!(told.cause(), Some(&Mistake::NoForward));
        let told = stepper.forward(&curve(3)).unwrap_err();
        assert_eq!(told.cause(), Some(&Mistake::Rows { found: 3, expected: 4 }));
        parts.iter().for_each(|part| stepper.add(part).unwrap());
        let told = stepper.add(&parts[0]).unwrap_err();
        assert_eq!(told.cause(), Some(&Mistake::StepIsDue { microbatches: 4 }));
        assert!(stepper.step(f64::NAN).is_err());
    }
}

#[test]
fn callbacks_may_stop_a_training() {
    let stop = |taken: usize| {
        move |at: usize| match at >= taken {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let after = stop(3);
    let report = trainer().data(curve(16)).on_step(move |taken| after(taken.step)).run().unwrap();
    assert_eq!(report.losses.len(), 3);
    let (after, mut told) = (stop(8), Vec::new());
    let mut training = trainer()
        .data(curve(16))
        .evaluate_every(4, curve(6))
        .on_evaluate(|held_out| {
            told.push(*held_out);
            after(held_out.after_step)
        })
        .build()
        .unwrap();
    training.fit(100).unwrap();
    assert_eq!(training.fit(2).unwrap().len(), 2, "it can go on");
    drop(training);
    let at: Vec<usize> = told.iter().map(|held_out| held_out.after_step).collect();
    assert_eq!((at, told[0].count), (vec![4, 8], 6));
}

fn llama() -> Llama {
    Llama::new(LlamaSpec {
        layers: 2,
        width: 16,
        heads: 2,
        kv_heads: 1,
        head_dim: 8,
        ffn: 32,
        vocab: 32,
        context: 16,
        norm_eps: 1e-5,
        rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        tied: false,
    })
}

#[test]
fn a_language_model_is_exported_and_read_back() {
    let corpus = || MarkovCorpus::new(0, 32, 1 << 14).unwrap();
    let trainer = || Trainer::new(llama()).data(corpus()).batch(8).seq_len(16).lr(1e-2).threads(1);
    let mut training: Training<'_> =
        trainer().mesh("dp=2").strategy(Zero::stage(3)).build().unwrap();
    let before = training.evaluate(corpus()).unwrap();
    training.fit(20).unwrap();
    let after = training.evaluate(corpus()).unwrap();
    assert!(after.loss < before.loss && after.count == before.count && after.count > 100);
    let dir = tempfile::tempdir().unwrap();
    training.export(dir.path(), phalanx::DType::F32).unwrap();
    let mut read = trainer().start_from(dir.path()).build().unwrap();
    near(after.loss, read.evaluate(corpus()).unwrap().loss, "exported");
    let ids = Table::new(1).ids("ids", (0..16).collect());
    let (a, b) = (training.predict(&ids).unwrap(), read.predict(&ids).unwrap());
    assert_eq!(a["logits"].shape, [1, 16, 32]);
    a["logits"].to_f64().iter().zip(b["logits"].to_f64()).for_each(|(a, b)| near(*a, b, "logits"));
}
