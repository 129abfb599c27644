//! A session's numbers, against derivatives, formulas and other ways of taking the same step.

use phalanx_config::{Config, Loaded, Sources};
use phalanx_cpu::CpuEngine;
use phalanx_engine::Late;
use phalanx_error::Result;
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Param};
use phalanx_models::hf::WeightTensor;
use phalanx_reference::ReferenceEngine;
use phalanx_session::network::Network;
use phalanx_session::{
    Field, Models, Prepared, RankWorker, ReadParam, Settings, StepData, StepResult, initial,
};
use std::collections::BTreeMap;
use std::ops::Range;

const VOCAB: u64 = 11;

fn config(sets: &[&str]) -> Loaded {
    let base = [
        "model.layers=2",
        "model.width=8",
        "model.heads=2",
        "model.ffn=12",
        "model.vocab=11",
        "train.batch_size=4",
        "train.seq_len=6",
        "precision.compute=f64",
        "optim.lr=0.01",
        "model.init_std=0.3",
    ];
    let sources = Sources::default().preset("tiny");
    let sources = base.iter().chain(sets).fold(sources, |s, set| s.set(*set));
    Config::load(&sources.set("model.kv_heads=1")).unwrap()
}

fn gpt(sets: &[&str]) -> Loaded {
    let sources = Sources::default().preset("gpt2-124m");
    let base = [
        "model.layers=2",
        "model.width=8",
        "model.heads=2",
        "model.ffn=12",
        "model.vocab=11",
        "model.context=6",
        "train.batch_size=4",
        "train.microbatches=1",
        "train.seq_len=6",
        "precision.compute=f64",
        "model.init_std=0.3",
    ];
    Config::load(&base.iter().chain(sets).fold(sources, |s, set| s.set(*set))).unwrap()
}

/// A session with its batches.
struct Trained<E: phalanx_engine::Engine> {
    session: RankWorker<E>,
    tokens: usize,
    rate: f64,
    rows: usize,
}

fn models(loaded: &Loaded) -> Models {
    let network = Network::new(loaded).unwrap();
    network.models(&loaded.config, true).unwrap()
}

fn start_from<E: phalanx_engine::Engine>(
    engine: E,
    loaded: &Loaded,
    read: &ReadParam<'_>,
) -> Result<Trained<E>> {
    let config = &loaded.config;
    let session = RankWorker::alone(engine, &models(loaded), Settings::new(config)?, read)?;
    Ok(Trained {
        session,
        tokens: config.train.tokens_per_step(),
        rate: config.optim.lr.get(),
        rows: config.train.batch_size.get(),
    })
}

fn start(loaded: &Loaded) -> Trained<ReferenceEngine> {
    start_from(ReferenceEngine::new(), loaded, &initial(loaded.config.run.seed)).unwrap()
}

impl<E: phalanx_engine::Engine> Trained<E> {
    /// The batch of a step: random tokens, every seventh target masked.
    fn with_batch<T>(
        &mut self,
        step: u64,
        run: impl FnOnce(&mut RankWorker<E>, &StepData<'_>) -> T,
    ) -> T {
        let stream = Stream::named(3, "test tokens");
        let at = |i: usize| step * 10_000 + i as u64;
        let token = |i: usize| stream.below(at(i), VOCAB) as i32;
        let ids: Vec<i32> = (0..self.tokens).map(token).collect();
        let masked = |i: usize| if i % 7 == 6 { -1 } else { token(i + 5_000) };
        let targets: Vec<i32> = (0..self.tokens).map(masked).collect();
        let count = targets.iter().filter(|&&t| t >= 0).count() as u64;
        let fields = [("ids", Field::I32(&ids)), ("targets", Field::I32(&targets))];
        let data = StepData {
            fields: &fields,
            count,
            first_sample: step * self.rows as u64,
            scalars: &[],
        };
        run(&mut self.session, &data)
    }

    fn step(&mut self, step: u64) -> StepResult {
        let rate = self.rate;
        self.with_batch(step, |session, data| session.step(data, rate)).unwrap()
    }

    fn evaluate(&mut self, step: u64) -> f64 {
        self.with_batch(step, |session, data| session.evaluate(data)).unwrap()
    }

    fn run(&mut self, steps: u64) -> Vec<StepResult> {
        (0..steps).map(|step| self.step(step)).collect()
    }
}

fn close(a: &BTreeMap<String, WeightTensor>, b: &BTreeMap<String, WeightTensor>, bound: f64) {
    assert_eq!(a.len(), b.len());
    for (name, tensor) in a {
        let (a, b) = (tensor.to_f64(), b[name].to_f64());
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            assert!((a - b).abs() <= bound, "{name}[{i}]: {a} and {b}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_seed_others() {
    let (mut a, mut b) = (start(&config(&[])), start(&config(&[])));
    assert_eq!(a.run(3), b.run(3));
    assert_eq!(a.session.params().unwrap(), b.session.params().unwrap());
    let mut c = start(&config(&["run.seed=1"]));
    assert_ne!(a.run(1), c.run(1));
}

#[test]
fn micro_batches_make_the_step_of_the_whole_batch() {
    for make in [config, gpt] {
        let mut whole = start(&make(&[]));
        let results = whole.run(3);
        for parts in ["train.microbatches=2", "train.microbatches=4"] {
            let mut cut = start(&make(&[parts]));
            for (a, b) in results.iter().zip(cut.run(3)) {
                assert!((a.loss - b.loss).abs() < 1e-13, "{a:?} and {b:?}");
                assert!((a.grad_norm - b.grad_norm).abs() < 1e-12, "{a:?} and {b:?}");
            }
            let (a, b) = (whole.session.params().unwrap(), cut.session.params().unwrap());
            close(&a, &b, 1e-9);
        }
    }
}

/// Masks are keyed by the global sample, so cutting the batch does not change them.
#[test]
fn dropout_does_not_depend_on_micro_batches() {
    let mut whole = start(&gpt(&["model.dropout=0.3"]));
    let mut cut = start(&gpt(&["model.dropout=0.3", "train.microbatches=4"]));
    let mut without = start(&gpt(&[]));
    let (a, b, c) = (whole.step(0), cut.step(0), without.step(0));
    assert!((a.loss - b.loss).abs() < 1e-13, "{a:?} and {b:?}");
    assert!((a.loss - c.loss).abs() > 1e-3, "no mask: {a:?} and {c:?}");
    let (a, b) = (whole.session.gradients().unwrap(), cut.session.gradients().unwrap());
    close(&a, &b, 1e-13);
}

/// Gradients against central differences of the evaluated loss, which no gradient code touches.
#[test]
fn gradients_are_the_derivatives_of_the_loss() {
    for loaded in [config(&["train.microbatches=2"]), gpt(&[])] {
        let mut trained = start(&loaded);
        let result = trained.step(0);
        let gradients = trained.session.gradients().unwrap();
        let mut squares = 0.0;
        for (name, gradient) in &gradients {
            let gradient = gradient.to_f64();
            squares += gradient.iter().map(|g| g * g).sum::<f64>();
            let at = gradient.len() / 2;
            let loss = |by: f64| {
                let initial = initial(loaded.config.run.seed);
                let moved = |param: &Param, ranges: &[Range<usize>], dtype: DType| {
                    let mut bytes = initial(param, ranges, dtype)?;
                    let place = ranges.iter().cloned().flatten().position(|i| i == at);
                    if let Some(place) = place.filter(|_| param.name == *name) {
                        assert_eq!(dtype, DType::F64);
                        let (values, _) = bytes.as_chunks_mut::<8>();
                        let value = &mut values[place];
                        *value = (f64::from_ne_bytes(*value) + by).to_ne_bytes();
                    }
                    Ok(bytes)
                };
                let moved = start_from(ReferenceEngine::new(), &loaded, &moved);
                moved.unwrap().evaluate(0)
            };
            let expected = (loss(1e-5) - loss(-1e-5)) / 2e-5;
            let found = gradient[at];
            assert!((found - expected).abs() < 1e-8, "{name}: {found} and {expected}");
        }
        assert!((result.grad_norm - squares.sqrt()).abs() < 1e-12);
    }
}

/// Two steps of AdamW with clipping, by the formulas of Loshchilov and Hutter.
#[test]
fn adamw_is_its_formula() {
    let clip = 0.05;
    let loaded = config(&["optim.clip=0.05", "optim.weight_decay=0.2", "train.microbatches=2"]);
    let mut trained = start(&loaded);
    let (lr, decay, [b1, b2]) = (trained.rate, 0.2, [0.9, 0.95]);
    let decays: BTreeMap<String, bool> = (models(&loaded).train.params().iter())
        .map(|p| (p.name.clone(), p.shape.len() > 1))
        .collect();
    let mut moments: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for t in 1..=2 {
        let before = trained.session.params().unwrap();
        let norm = trained.step(t as u64).grad_norm;
        let factor = f64::min(1.0, clip / (norm + 1e-6));
        assert!(factor < 1.0, "the test should clip");
        let gradients = trained.session.gradients().unwrap();
        let after = trained.session.params().unwrap();
        for (name, before) in &before {
            let decay = if decays[name] { decay } else { 0.0 };
            let (before, after) = (before.to_f64(), after[name].to_f64());
            let moments = moments.entry(name.clone()).or_insert(vec![(0.0, 0.0); before.len()]);
            for (i, g) in gradients[name].to_f64().iter().enumerate() {
                let (g, (m, v)) = (g * factor, &mut moments[i]);
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                let (m, v) = (*m / (1.0 - b1.powi(t)), *v / (1.0 - b2.powi(t)));
                let expected = before[i] * (1.0 - lr * decay) - lr * m / (v.sqrt() + 1e-8);
                let found = after[i];
                assert!((found - expected).abs() < 1e-12, "{name}[{i}]: {found}, {expected}");
            }
        }
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for precision in ["precision.compute=f64", "precision.compute=bf16"] {
        let runs = ["none", "selective", "full"].map(|policy| {
            let policy = format!("train.recompute={policy}");
            let sets = [precision, "model.attention=materialised", &policy];
            let mut trained = start(&config(&sets));
            let results = trained.run(2);
            (results, trained.session.params().unwrap())
        });
        assert_eq!(runs[0], runs[1], "{precision}");
        assert_eq!(runs[0], runs[2], "{precision}");
    }
}

#[test]
fn every_precision_learns_a_batch_by_heart() {
    for sets in [
        ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"],
        ["precision.compute=bf16", "precision.weights=f32", "precision.grads=f32"],
        ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"],
        ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"],
        ["precision.compute=f32", "precision.weights=bf16", "precision.grads=f32"],
    ] {
        let mut trained = start(&config(&sets));
        trained.rate = 0.02;
        let first = trained.step(0).loss;
        for _ in 0..20 {
            trained.step(0);
        }
        let last = trained.evaluate(0);
        assert!(last < 0.8 * first, "{sets:?}: {first} → {last}");
    }
}

#[test]
fn a_late_engine_takes_the_same_steps() {
    let loaded = config(&["train.microbatches=2"]);
    let engine = Late::new(ReferenceEngine::new(), 5);
    let mut late = start_from(engine, &loaded, &initial(0)).unwrap();
    assert_eq!(late.run(2), start(&loaded).run(2));
    assert_eq!(late.session.engine().poisoned_reads(), 0);
}

/// The CPU engine against the interpreter, which shares no code with it.
#[test]
fn the_cpu_engine_takes_the_same_steps() {
    for loaded in [config(&["train.microbatches=2"]), gpt(&["model.dropout=0.2"])] {
        let mut truth = start(&loaded);
        let expected = truth.run(3);
        for threads in [1, 2] {
            let run = || {
                let engine = CpuEngine::new(threads).unwrap();
                let mut trained = start_from(engine, &loaded, &initial(0)).unwrap();
                (trained.run(3), trained.session.params().unwrap())
            };
            let (found, params) = run();
            for (a, b) in expected.iter().zip(&found) {
                assert!((a.loss - b.loss).abs() < 1e-12, "{a:?} and {b:?}");
                assert!((a.grad_norm - b.grad_norm).abs() < 1e-11, "{a:?} and {b:?}");
            }
            close(&truth.session.params().unwrap(), &params, 1e-9);
            assert_eq!((found, params), run(), "the same bits again");
        }
    }
}

#[test]
fn evaluation_leaves_the_weights_and_the_next_steps_alone() {
    let (mut plain, mut evaluated) = (start(&config(&[])), start(&config(&[])));
    plain.step(0);
    evaluated.step(0);
    assert_eq!(evaluated.evaluate(1), evaluated.evaluate(1));
    assert_eq!(plain.step(1), evaluated.step(1));
    // The evaluated loss is the one that the next step finds before its update.
    let expected = plain.evaluate(2);
    let found = plain.step(2).loss;
    assert!((expected - found).abs() < 1e-13, "{expected} and {found}");
}

#[test]
fn a_plan_beyond_the_limit_is_refused() {
    let loaded = config(&["run.memory_limit=\"1 KiB\""]);
    let settings = Settings::new(&loaded.config).unwrap();
    let error = Prepared::new(&models(&loaded), settings).map(|_| ()).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("run.memory_limit allows 1024"), "{error}");
}

#[test]
fn a_batch_that_does_not_fit_is_refused_by_name() {
    let mut trained = start(&config(&[]));
    let ids = [1; 5];
    let mut step = |fields: &[(&str, Field<'_>)]| {
        let data = StepData { fields, count: 1, first_sample: 0, scalars: &[] };
        trained.session.step(&data, 0.1).unwrap_err().to_string()
    };
    assert!(step(&[("idz", Field::I32(&ids))]).contains("`ids`"));
    assert!(step(&[("ids", Field::I32(&ids))]).contains("5 values of `ids`"));
    // As many bytes, but other numbers.
    let said = step(&[("ids", Field::F32(&[1.0; 5]))]);
    assert!(said.contains("gives `ids` as f32, the model reads i32"), "{said}");
}
