//! Training on the late engine: the same bits in whatever order calls run, and a missing edge is
//! found.

use std::collections::BTreeSet;

use phalanx_engine::{Args, Engine, Late, Span, Target};
use phalanx_ir::{Builder, DType};
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::ReferenceEngine;
use phalanx_script::{Lane, Slots, Tier};
use phalanx_testing::schedules::{all_deferred, spread_lanes};
use phalanx_testing::suite::{self, MICROBATCHES};
use phalanx_testing::{Rig, Setup, tiny};

use crate::forgetful::Forgetful;

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 6 };

/// The preset `tiny` with narrower layers, as the interpreter is slow.
fn rig<E: Engine>(engine: E) -> Rig<E> {
    let setup = Setup {
        microbatches: MICROBATCHES,
        schedule: all_deferred,
        edit: spread_lanes,
        ..Setup::new(DType::F32)
    };
    let model = tiny(4).model(SHAPE, DType::F32).unwrap();
    let mut rig = Rig::new(engine, &model, &setup);
    rig.initialise(1);
    rig
}

fn step<E: Engine>(rig: &mut Rig<E>) -> (f64, f64) {
    let batches = suite::batches(SHAPE, tiny(4).spec.vocab);
    rig.step(&batches, 1e-3, 0.05)
}

#[test]
fn late_calls_keep_the_bits() {
    suite::late_calls_keep_the_bits(ReferenceEngine::new, &tiny(4), SHAPE);
}

#[test]
fn an_executor_that_names_no_events_is_found_out() {
    for seed in 0..4 {
        let late = Late::new(ReferenceEngine::new(), seed);
        let mut rig = rig(Forgetful::around(late, |_| true));
        let (loss, norm) = step(&mut rig);
        assert!(rig.executor().engine().inner.poisoned_reads() > 0);
        assert!(loss.is_nan() || norm.is_nan(), "seed {seed}: {loss}, {norm}");
    }
}

/// Reading too early is one mistake; writing too early, over what an earlier call is still to
/// read, is the other.
#[test]
fn a_write_over_what_a_queued_call_reads_is_found_out() {
    let b = Builder::new("double", DType::F32);
    b.output("y", b.data("x", DType::F32, [1]).scale(2.0));
    let program = b.finish().unwrap();
    let place = |index: usize| Span::device(4 * index, 4);
    let mut results = BTreeSet::new();
    for seed in 0..8 {
        let mut engine = Late::new(ReferenceEngine::new(), seed);
        let slots = Slots::assign_for(&program, &*engine.requirements());
        let kernel = engine.compile(&program, &slots, &[0]).unwrap();
        engine.reserve(Tier::Device, 12).unwrap();
        engine.upload(place(0), &1f32.to_le_bytes()).unwrap();
        engine.upload(place(1), &8f32.to_le_bytes()).unwrap();
        // The first call reads place 0, the second one writes it.
        let mut launch = |from, to| {
            let args = Args {
                inputs: &[place(from)],
                outputs: &[Target { span: place(to), add: false }],
                workspace: Span::default(),
            };
            engine.launch(&kernel, &args, Lane::Compute, &[]).unwrap()
        };
        let events = [launch(0, 2), launch(1, 0)];
        events.iter().for_each(|e| engine.wait(*e).unwrap());
        let mut bytes = [0; 4];
        engine.download(place(2), &mut bytes).unwrap();
        let found = (engine.poisoned_reads(), f32::from_le_bytes(bytes).is_nan());
        results.insert(found);
    }
    // Both orders came up; the wrong one was noticed, and spoilt the result.
    assert_eq!(results.into_iter().collect::<Vec<_>>(), [(0, false), (1, true)]);
}

/// Every single call that has to wait: one of a few orders shows that it did not.
#[test]
fn a_single_missing_edge_is_found_out() {
    let actions = rig(ReferenceEngine::new()).script().actions.len();
    // The first call waits for nothing.
    for missing in (1..actions).step_by(7) {
        let found = (0..12).any(|seed| {
            let late = Late::new(ReferenceEngine::new(), seed);
            let mut rig = rig(Forgetful::around(late, move |call| call == missing));
            step(&mut rig);
            rig.executor().engine().inner.poisoned_reads() > 0
        });
        assert!(found, "nobody noticed that call {missing} does not wait");
    }
}
