//! What every engine must pass.
//!
//! Each function trains small models for two steps and compares losses, norms, gradients and
//! parameters: with themselves under another policy or schedule, where every bit must agree, or
//! with the interpreter, within rounding.

use std::collections::BTreeMap;

use phalanx_autodiff::Recompute;
use phalanx_engine::{Engine, Late};
use phalanx_ir::DType;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::random::Stream;
use phalanx_models::{Architecture, BatchShape, Llama, port};
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_script::{Category, accumulate};

use crate::compile::{compile, optimise};
use crate::errors::Errors;
use crate::rig::{Rig, RigBatch, Setup};
use crate::schedules::{all_deferred, deferred, split, spread_lanes};
use crate::small::{VOCAB, gpt, llama};

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 5 };
/// Micro-batches of the suite's steps.
pub const MICROBATCHES: usize = 2;
const DTYPES: [DType; 3] = [DType::F64, DType::F32, DType::Bf16];

/// Recomputation changes which residuals are kept, but no bit of the results.
pub fn recomputation_keeps_the_bits<E: Engine>(engine: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let of = |recompute| {
            let setup = Setup { recompute, ..setup.clone() };
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
            let setup = Setup { schedule, ..setup.clone() };
            train(engine(), model, &setup)
        };
        let expected = of(accumulate);
        assert_same_bits(&of(split), &expected, &format!("{what}, W at once"));
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

/// Two engines that differ in nothing that may change a number give the same bits.
pub fn engines_have_the_same_bits<E: Engine>(engine: impl Fn() -> E, other: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let of = |engine| train(engine, model, setup);
        assert_same_bits(&of(other()), &of(engine()), &format!("{what}, the other engine"));
    });
}

/// The numbers are those of the interpreter, including dropout masks.
pub fn numbers_are_the_interpreters<E: Engine>(engine: impl Fn() -> E) {
    for_each_case(|what, model, setup| {
        let tolerance = match setup.precision.weights {
            DType::F64 => 1e-12,
            DType::F32 => 1e-5,
            _ => 0.05,
        };
        let mut errors = Errors::new();
        let expected = step(&mut prepare(ReferenceEngine::new(), model, setup), SHAPE, VOCAB);
        for (name, found) in step(&mut prepare(engine(), model, setup), SHAPE, VOCAB) {
            // Not parameters: AdamW turns the rounding noise of gradients that vanish into steps.
            if !name.starts_with("new ") {
                errors.add(&name, found, expected[&name].clone());
            }
        }
        errors.assert_within(tolerance, what);
    });
}

/// A language model trains to the same bits on an engine that runs its calls late and out of order,
/// where only buffers order the actions; and no call reads poison.
pub fn late_calls_keep_the_bits<E: Engine>(
    engine: impl Fn() -> E,
    model: &Llama,
    shape: BatchShape,
) {
    let setup = Setup {
        microbatches: MICROBATCHES,
        schedule: all_deferred,
        edit: spread_lanes,
        ..Setup::new(DType::F32)
    };
    let vocab = model.spec.vocab;
    let model = model.model(shape, DType::F32).unwrap();
    let expected = {
        let mut rig = Rig::new(engine(), &model, &setup);
        rig.initialise(1);
        (0..3).map(|_| step(&mut rig, shape, vocab)).last().unwrap()
    };
    assert!(expected["loss"][0].is_finite() && expected["norm"][0] > 0.0);
    for seed in 0..3 {
        let mut rig = Rig::new(Late::new(engine(), seed), &model, &setup);
        rig.initialise(1);
        let found = (0..3).map(|_| step(&mut rig, shape, vocab)).last().unwrap();
        assert_eq!(rig.executor().engine().poisoned_reads(), 0, "seed {seed}");
        assert_same_bits(&found, &expected, &format!("late, seed {seed}"));
    }
}

/// What a step writes, measured byte by byte, is what the plan says: in every category, except the
/// workspace on an engine that has none in its arena.
pub fn memory_is_written_as_planned<E: Engine>(engine: impl Fn() -> E, workspace: bool) {
    for_each_case(|what, model, setup| {
        for recompute in Recompute::ALL {
            let setup = Setup { recompute, ..setup.clone() };
            let mut rig = prepare(engine(), model, &setup);
            step(&mut rig, SHAPE, VOCAB);
            for (category, planned, measured) in rig.memory() {
                if workspace || category != Category::Workspace {
                    assert_eq!(measured, planned, "{what}, {recompute}: {category}");
                }
            }
        }
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
                    microbatches: MICROBATCHES,
                    schedule: accumulate,
                    ..Setup::new(dtype)
                };
                test(&format!("{name}, {dtype}, {passes}"), model.as_ref(), &setup);
            }
        }
    }
}

/// Named results of a run.
type Results = BTreeMap<String, Vec<f64>>;

fn train<E: Engine>(engine: E, model: &dyn Architecture, setup: &Setup) -> Results {
    let mut rig = prepare(engine, model, setup);
    step(&mut rig, SHAPE, VOCAB);
    step(&mut rig, SHAPE, VOCAB)
}

fn prepare<E: Engine>(engine: E, model: &dyn Architecture, setup: &Setup) -> Rig<E> {
    let model = model.model(SHAPE, setup.precision.weights).unwrap();
    let mut rig = Rig::new(engine, &model, setup);
    rig.initialise(3);
    rig
}

fn step<E: Engine>(rig: &mut Rig<E>, shape: BatchShape, vocab: usize) -> Results {
    let batches = batches(shape, vocab);
    let inverse = 1.0 / (MICROBATCHES * shape.batch * shape.seq) as f64;
    let (loss, norm) = rig.step(&batches, 0.01, inverse);
    let mut results = Results::new();
    results.insert("loss".to_owned(), vec![loss]);
    results.insert("norm".to_owned(), vec![norm]);
    let names: Vec<String> = rig.model().params().iter().map(|p| p.name.clone()).collect();
    for name in names {
        results.insert(format!("gradient of {name}"), rig.gradient(&name));
        results.insert(format!("new {name}"), rig.param(&name));
    }
    results
}

/// Random tokens for every micro-batch of a step.
pub fn batches(shape: BatchShape, vocab: usize) -> Vec<RigBatch> {
    let ids = |name: &str, i: usize| {
        let stream = Stream::named(19, &format!("{name} {i}"));
        let ids = RefTensor::ids(&[shape.batch, shape.seq], vocab as u32, stream);
        (name.to_owned(), ids)
    };
    (0..MICROBATCHES)
        .map(|i| RigBatch {
            data: vec![ids(port::IDS, i), ids(port::TARGETS, i)],
            first: (i * shape.batch) as i32,
        })
        .collect()
}

fn assert_same_bits(found: &Results, expected: &Results, what: &str) {
    for (name, expected) in expected {
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&found[name]) == bits(expected), "{what}: {name}");
    }
}
