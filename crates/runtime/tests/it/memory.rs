//! What a step really writes, measured byte by byte, is what the plan says.

use phalanx_autodiff::Recompute;
use phalanx_ir::DType;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::random::Stream;
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::{ReferenceEngine, Tensor};
use phalanx_script::{Category, Script, accumulate};
use phalanx_testing::{Batch, Rig, Setup, VOCAB, gpt};

fn setup(dtype: DType) -> Setup {
    Setup {
        microbatches: 2,
        schedule: accumulate,
        ..Setup::new(dtype)
    }
}

fn rig(setup: &Setup) -> Rig<ReferenceEngine> {
    let shape = BatchShape { batch: 2, seq: 5 };
    let model = gpt(AttentionKind::Materialised, 0.0);
    let model = model.model(shape, setup.precision.weights).unwrap();
    let mut rig = Rig::new(ReferenceEngine::new(), &model, setup);
    rig.initialise(1);
    rig
}

/// A step that changes nothing, as its learning rate is zero.
fn step(rig: &mut Rig<ReferenceEngine>) -> (f64, f64) {
    let ids = |name: &str| {
        let ids = Tensor::ids(&[2, 5], VOCAB as u32, Stream::named(5, name));
        (name.to_owned(), ids)
    };
    let batch = Batch {
        data: vec![ids("ids"), ids("targets")],
        first: 0,
    };
    rig.step(&[batch.clone(), batch], 0.0, 0.1)
}

/// By category: what was planned, and what was measured.
fn peaks(rig: &mut Rig<ReferenceEngine>) -> Vec<(Category, usize, usize)> {
    let id = rig.script();
    let executor = rig.executor();
    let observed = executor.observe(id).unwrap();
    let rows = observed.peaks.into_iter();
    rows.map(|(category, bytes)| (category, executor.plan(id).peak(category), bytes))
        .collect()
}

/// The interpreter has no workspace, so that category is left to engines that have one.
#[test]
fn buffers_are_written_as_planned() {
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        for recompute in Recompute::ALL {
            let mut rig = rig(&Setup {
                recompute,
                ..setup(dtype)
            });
            let before = step(&mut rig);
            for (category, planned, measured) in peaks(&mut rig) {
                if category != Category::Workspace {
                    assert_eq!(measured, planned, "{dtype}, {recompute}: {category}");
                }
            }
            assert_eq!(step(&mut rig), before, "observing changes nothing");
        }
    }
}

#[test]
fn bytes_that_nothing_writes_are_noticed() {
    fn enlarge(script: &mut Script) {
        let kept = |b: &phalanx_script::Buffer| b.category == Category::Residuals;
        script.buffers.iter_mut().find(|b| kept(b)).unwrap().bytes += 64;
    }
    let mut rig = rig(&Setup {
        edit: enlarge,
        ..setup(DType::F32)
    });
    step(&mut rig);
    for (category, planned, measured) in peaks(&mut rig) {
        match category {
            Category::Workspace => {}
            Category::Residuals => assert_eq!(measured + 64, planned),
            _ => assert_eq!(measured, planned, "{category}"),
        }
    }
}
