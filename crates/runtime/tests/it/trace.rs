//! A traced run does what any run does, and its times fit the script.

use phalanx_engine::{Engine, Late};
use phalanx_ir::DType;
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::ReferenceEngine;
use phalanx_runtime::TimedAction;
use phalanx_script::{HappensBefore, Lane};
use phalanx_testing::schedules::{all_deferred, spread_lanes};
use phalanx_testing::suite::{self, MICROBATCHES};
use phalanx_testing::{Rig, Setup, tiny};

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 6 };

/// A rig whose inputs have been fed by a step that changes nothing.
fn rig<E: Engine>(engine: E) -> (Rig<E>, (f64, f64)) {
    let setup = Setup {
        microbatches: MICROBATCHES,
        schedule: all_deferred,
        edit: spread_lanes,
        ..Setup::new(DType::F32)
    };
    let model = tiny(2).model(SHAPE, DType::F32).unwrap();
    let mut rig = Rig::new(engine, &model, &setup);
    rig.initialise(1);
    let first = rig.step(&suite::batches(SHAPE, tiny(2).spec.vocab), 0.0, 0.05);
    (rig, first)
}

#[test]
fn a_traced_run_gives_the_same_numbers_in_an_order_that_its_edges_allow() {
    for seed in 0..4 {
        let (mut rig, before) = rig(Late::new(ReferenceEngine::new(), seed));
        let script = rig.script().clone();
        let (timed, again) = rig.traced();
        assert_eq!(again, before, "seed {seed}");
        // Everything that makes a call, once, in the order of the script.
        let calls: Vec<usize> = timed.iter().map(|t| t.action).collect();
        let expected: Vec<usize> = (0..script.actions.len())
            .filter(|&action| script.actions[action].run().is_some())
            .collect();
        assert_eq!(calls, expected);
        let order = HappensBefore::of(&script).unwrap();
        for (i, b) in timed.iter().enumerate() {
            assert!(b.issued <= b.started && b.started <= b.ended, "{b:?}");
            assert_eq!(b.lane, script.actions[b.action].lane);
            for a in timed[..i].iter().filter(|a| order.before(a.action, b.action)) {
                assert!(a.ended <= b.started, "{a:?} is not over when {b:?} starts");
            }
        }
        let compute: Vec<&TimedAction> = timed.iter().filter(|t| t.lane == Lane::Compute).collect();
        assert!(compute.windows(2).all(|pair| pair[0].ended <= pair[1].started));
        assert!(timed.iter().any(|t| t.lane != Lane::Compute), "lanes were spread");
    }
}
