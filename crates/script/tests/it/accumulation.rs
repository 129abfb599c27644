//! Gradient accumulation: micro-batches, in any schedule, add up to one large batch.

use phalanx_autodiff::Recompute;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Model};
use phalanx_models::{Architecture, BatchShape, Gpt};
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_script::{Write, accumulate};
use phalanx_testing::schedules::{all_deferred, deferred, in_flight, split};
use phalanx_testing::{Errors, Rig, RigBatch, Setup, VOCAB, gpt};

const SEQ: usize = 4;
const SAMPLES: usize = 6;

fn model(gpt: &Gpt, batch: usize) -> Model {
    let shape = BatchShape { batch, seq: SEQ };
    gpt.model(shape, DType::F64).unwrap()
}

/// All samples, cut into micro-batches; each sample's numbers follow from its global index.
fn batches(microbatches: usize) -> Vec<RigBatch> {
    let ids = |name: &str| {
        let stream = Stream::named(3, name);
        RefTensor::ids(&[SAMPLES, SEQ], VOCAB as u32, stream).values()
    };
    let (tokens, targets) = (ids("ids"), ids("targets"));
    let each = SAMPLES / microbatches;
    let cut = |values: &[f64], i: usize| {
        let part = &values[i * each * SEQ..][..each * SEQ];
        RefTensor::new(DType::I32, &[each, SEQ], part).unwrap()
    };
    (0..microbatches)
        .map(|i| RigBatch {
            data: vec![
                ("ids".to_owned(), cut(&tokens, i)),
                ("targets".to_owned(), cut(&targets, i)),
            ],
            first: (i * each) as i32,
        })
        .collect()
}

fn trained(gpt: &Gpt, setup: &Setup) -> (Vec<(f64, f64)>, Rig<ReferenceEngine>) {
    let model = model(gpt, SAMPLES / setup.microbatches);
    let mut rig = Rig::new(ReferenceEngine::new(), &model, setup);
    rig.initialise(5);
    let batches = batches(setup.microbatches);
    let inverse = 1.0 / (SAMPLES * SEQ) as f64;
    let steps = (0..3).map(|_| rig.step(&batches, 0.01, inverse)).collect();
    (steps, rig)
}

/// With dropout too: masks are keyed by the global sample, not by its place in a micro-batch.
#[test]
fn micro_batches_add_up_to_one_batch() {
    let plain = Setup::new(DType::F64);
    for dropout in [0.0, 0.2] {
        let gpt = gpt(AttentionKind::Flash, dropout);
        let (expected, mut whole) = trained(&gpt, &plain);
        let schedules = [plain.schedule, accumulate, split, deferred, in_flight, all_deferred];
        for (index, schedule) in schedules.into_iter().enumerate() {
            for microbatches in [1, 2, 3] {
                for recompute in [Recompute::None, Recompute::Full] {
                    let setup = Setup { microbatches, schedule, recompute, ..plain.clone() };
                    let what = format!("schedule {index}, {microbatches}, {recompute}, {dropout}");
                    let (found, mut rig) = trained(&gpt, &setup);
                    for (a, b) in found.iter().zip(&expected) {
                        assert!((a.0 - b.0).abs() <= 1e-12 * b.0, "{what}: {a:?} {b:?}");
                        assert!((a.1 - b.1).abs() <= 1e-11 * b.1, "{what}: {a:?} {b:?}");
                    }
                    let mut errors = Errors::new();
                    for param in model(&gpt, 1).params() {
                        let name = &param.name;
                        errors.add(name, rig.gradient(name), whole.gradient(name));
                    }
                    errors.assert_within(1e-10, &what);
                }
            }
        }
    }
}

#[test]
fn a_tied_weight_gets_two_contributions_of_every_micro_batch() {
    let gpt = gpt(AttentionKind::Flash, 0.0);
    for microbatches in [1, 2, 3] {
        let setup = Setup { microbatches, ..Setup::new(DType::F64) };
        let model = model(&gpt, 1);
        let rig = Rig::new(ReferenceEngine::new(), &model, &setup);
        let script = rig.script();
        for (number, param) in model.params().iter().enumerate() {
            let users = if param.name == "embed" { 2 } else { 1 };
            let mut writes = Vec::new();
            for run in script.actions.iter().filter_map(|a| a.run()) {
                for (output, contribution) in &run.contributes {
                    if contribution.param == number {
                        writes.push(run.outputs[*output].1);
                    }
                }
            }
            let mut expected = vec![Write::Add; users * microbatches];
            expected[0] = Write::Overwrite;
            assert_eq!(writes, expected, "{}", param.name);
            let complete = script.accumulators.iter().flat_map(|a| a.complete.iter().flatten());
            let awaited = complete.filter(|c| c.param == number).count();
            assert_eq!(awaited, users * microbatches, "{}", param.name);
        }
    }
}
