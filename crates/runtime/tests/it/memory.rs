//! What a step really writes, measured byte by byte, is what the plan says.

use phalanx_ir::DType;
use phalanx_ir::ops::AttentionKind;
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::ReferenceEngine;
use phalanx_script::{Category, Script, accumulate};
use phalanx_testing::suite::{self, MICROBATCHES};
use phalanx_testing::{Rig, Setup, VOCAB, gpt};

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 5 };

fn setup(dtype: DType) -> Setup {
    Setup { microbatches: MICROBATCHES, schedule: accumulate, ..Setup::new(dtype) }
}

fn rig(setup: &Setup) -> Rig<ReferenceEngine> {
    let model = gpt(AttentionKind::Materialised, 0.0);
    let model = model.model(SHAPE, setup.precision.weights).unwrap();
    let mut rig = Rig::new(ReferenceEngine::new(), &model, setup);
    rig.initialise(1);
    rig
}

/// A step that changes nothing, as its learning rate is zero.
fn step(rig: &mut Rig<ReferenceEngine>) -> (f64, f64) {
    rig.step(&suite::batches(SHAPE, VOCAB), 0.0, 0.1)
}

#[test]
fn buffers_are_written_as_planned() {
    suite::memory_is_written_as_planned(ReferenceEngine::new, false);
}

#[test]
fn observing_changes_nothing() {
    let mut rig = rig(&setup(DType::F32));
    let before = step(&mut rig);
    rig.memory();
    assert_eq!(step(&mut rig), before);
}

/// Gradients too, though their buffers have padding that nothing is to write.
#[test]
fn bytes_that_nothing_writes_are_noticed() {
    fn enlarge(script: &mut Script, category: Category) {
        let found = script.buffers.iter_mut().find(|b| b.category == category);
        found.unwrap().bytes += 64;
    }
    for enlarged in [Category::Residuals, Category::Gradients] {
        let edit = match enlarged {
            Category::Gradients => |script: &mut Script| enlarge(script, Category::Gradients),
            _ => |script: &mut Script| enlarge(script, Category::Residuals),
        };
        let mut rig = rig(&Setup { edit, ..setup(DType::F32) });
        step(&mut rig);
        for (category, planned, measured) in rig.memory() {
            match category {
                Category::Workspace => {}
                _ if category == enlarged => assert_eq!(measured + 64, planned, "{category}"),
                _ => assert_eq!(measured, planned, "{category}"),
            }
        }
    }
}
