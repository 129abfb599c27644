//! What every engine must pass.
//!
//! Each function trains small models for two steps and compares losses, norms, gradients and
//! parameters: with themselves under another policy or schedule, where every bit must agree, or
//! with the interpreter, within rounding.

use std::collections::BTreeMap;

use phalanx_autodiff::Recompute;
use phalanx_engine::Engine;
use phalanx_ir::DType;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::random::Stream;
use phalanx_models::{Architecture, BatchShape, port};
use phalanx_reference::{ReferenceEngine, Tensor};
use phalanx_script::{Part, Step, accumulate};

use crate::compile::{compile, optimise};
use crate::errors::Errors;
use crate::rig::{Batch, Rig, Setup};
use crate::small::{VOCAB, gpt, llama};

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 5 };
const DTYPES: [DType; 3] = [DType::F64, DType::F32, DType::Bf16];

/// Recomputation moves residuals from kept to made again, and changes no bit.
pub fn recomputation_keeps_the_bits<E: Engine>(engine: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let of = |recompute| {
            let setup = Setup {
                recompute,
                ..setup.clone()
            };
            train(engine(), model, &setup)
        };
        let expected = of(Recompute::None);
        for recompute in [Recompute::Selective, Recompute::Full] {
            assert_same_bits(&of(recompute), &expected, &format!("{what}, {recompute}"));
        }
    });
}

/// B followed by W, at once or much later, is BW.
pub fn a_split_backward_keeps_the_bits<E: Engine>(engine: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let of = |schedule| {
            let setup = Setup {
                schedule,
                ..setup.clone()
            };
            train(engine(), model, &setup)
        };
        let expected = of(accumulate);
        assert_same_bits(&of(at_once), &expected, &format!("{what}, W at once"));
        assert_same_bits(&of(deferred), &expected, &format!("{what}, W deferred"));
    });
}

/// The same run twice gives the same bits.
pub fn a_run_can_be_repeated<E: Engine>(engine: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let of = || train(engine(), model, setup);
        assert_same_bits(&of(), &of(), &format!("{what}, again"));
    });
}

/// The numbers are those of the interpreter, dropout masks among them.
pub fn numbers_are_the_interpreters<E: Engine>(engine: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let tolerance = match setup.precision.weights {
            DType::F64 => 1e-12,
            DType::F32 => 1e-5,
            _ => 0.05,
        };
        let mut errors = Errors::new();
        let expected = step(&mut prepare(ReferenceEngine::new(), model, setup));
        for (name, found) in step(&mut prepare(engine(), model, setup)) {
            // Not parameters: AdamW turns the rounding noise of gradients that vanish into steps.
            if !name.starts_with("new ") {
                errors.add(&name, found, expected[&name].clone());
            }
        }
        errors.assert_within(tolerance, what);
    });
}

/// Every small language model, in every precision, with and without passes.
fn for_each_case(test: impl Fn(&str, &dyn Architecture, &Setup)) {
    let mut models: Vec<(String, Box<dyn Architecture>)> = Vec::new();
    for attention in [AttentionKind::Flash, AttentionKind::Materialised] {
        for dropout in [0.0, 0.3] {
            let name = format!("gpt, {attention}, dropout {dropout}");
            models.push((name, Box::new(gpt(attention, dropout))));
        }
        let name = format!("llama, {attention}");
        models.push((name, Box::new(llama(attention, true))));
    }
    for (name, model) in &models {
        for dtype in DTYPES {
            for (passes, compile) in [("plain", compile as _), ("optimised", optimise as _)] {
                let setup = Setup {
                    compile,
                    microbatches: 2,
                    schedule: accumulate,
                    ..Setup::new(dtype)
                };
                test(
                    &format!("{name}, {dtype}, {passes}"),
                    model.as_ref(),
                    &setup,
                );
            }
        }
    }
}

/// Named results of a run.
type Results = BTreeMap<String, Vec<f64>>;

fn train<E: Engine>(engine: E, model: &dyn Architecture, setup: &Setup) -> Results {
    let mut rig = prepare(engine, model, setup);
    step(&mut rig);
    step(&mut rig)
}

fn prepare<E: Engine>(engine: E, model: &dyn Architecture, setup: &Setup) -> Rig<E> {
    let model = model.model(SHAPE, setup.precision.weights).unwrap();
    let mut rig = Rig::new(engine, &model, setup);
    rig.initialise(3);
    rig
}

fn step<E: Engine>(rig: &mut Rig<E>) -> Results {
    let microbatches = 2;
    let ids = |name: &str, i: usize| {
        let stream = Stream::named(19, &format!("{name} {i}"));
        let ids = Tensor::ids(&[SHAPE.batch, SHAPE.seq], VOCAB as u32, stream);
        (name.to_owned(), ids)
    };
    let batches: Vec<Batch> = (0..microbatches)
        .map(|i| Batch {
            data: vec![ids(port::IDS, i), ids(port::TARGETS, i)],
            first: (i * SHAPE.batch) as i32,
        })
        .collect();
    let inverse = 1.0 / (microbatches * SHAPE.batch * SHAPE.seq) as f64;
    let (loss, norm) = rig.step(&batches, 0.01, inverse);
    let mut results = Results::new();
    results.insert("loss".to_owned(), vec![loss]);
    results.insert("norm".to_owned(), vec![norm]);
    let names: Vec<String> = rig
        .model()
        .params()
        .iter()
        .map(|p| p.name.clone())
        .collect();
    for name in names {
        results.insert(format!("gradient of {name}"), rig.gradient(&name));
        results.insert(format!("new {name}"), rig.param(&name));
    }
    results
}

fn assert_same_bits(found: &Results, expected: &Results, what: &str) {
    for (name, expected) in expected {
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&found[name]) == bits(expected), "{what}: {name}");
    }
}

fn at_once(instances: usize, microbatches: usize) -> Vec<Step> {
    let steps = accumulate(instances, microbatches).into_iter();
    let split = |step: Step| match step.part {
        Part::BW => vec![Part::B, Part::W],
        part => vec![part],
    };
    steps
        .flat_map(|step| {
            split(step)
                .into_iter()
                .map(move |part| Step { part, ..step })
        })
        .collect()
}

/// Every W of a micro-batch after all its B, first instance first.
fn deferred(instances: usize, microbatches: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    for microbatch in 0..microbatches {
        let step = |part| {
            move |instance| Step {
                instance,
                part,
                microbatch,
            }
        };
        steps.extend((0..instances).map(step(Part::F)));
        steps.extend((0..instances).rev().map(step(Part::B)));
        steps.extend((0..instances).rev().map(step(Part::W)));
    }
    steps
}
