//! Training on the late engine: the same bits in whatever order calls run, and a missing edge is
//! found.

use std::collections::BTreeSet;

use phalanx_engine::{Args, Engine, Late, Span, Target};
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Model};
use phalanx_models::hf::{LlamaSpec, RopeScaling, RopeSpec};
use phalanx_models::{Architecture, BatchShape, Llama};
use phalanx_reference::{ReferenceEngine, Tensor};
use phalanx_script::{Lane, Part, Script, Slots, Step};
use phalanx_testing::{Batch, Rig, Setup};

use crate::forgetful::Forgetful;

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 6 };
const MICROBATCHES: usize = 2;
const VOCAB: usize = 61;

/// The preset `tiny` with narrower layers, as the interpreter is slow: as many layers and heads.
fn tiny() -> Model {
    let rope = RopeSpec {
        theta: 10000.0,
        scaling: RopeScaling::None,
    };
    let spec = LlamaSpec {
        layers: 8,
        width: 16,
        heads: 8,
        kv_heads: 4,
        head_dim: 2,
        ffn: 24,
        vocab: VOCAB,
        context: 64,
        norm_eps: 1e-5,
        rope,
        tied: false,
    };
    Llama::new(spec).model(SHAPE, DType::F32).unwrap()
}

/// Everything forwards, then B of all micro-batches, then W: much that need not wait.
fn split(instances: usize, microbatches: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    for part in [Part::F, Part::B, Part::W] {
        for microbatch in 0..microbatches {
            let step = |instance| Step {
                instance,
                part,
                microbatch,
            };
            match part {
                Part::F => steps.extend((0..instances).map(step)),
                _ => steps.extend((0..instances).rev().map(step)),
            }
        }
    }
    steps
}

/// Spreads the actions over lanes without rhyme or reason: only what buffers imply orders them.
fn spread(script: &mut Script) {
    let lanes = [
        Lane::Compute,
        Lane::Gather,
        Lane::Reduce,
        Lane::Copy,
        Lane::Host,
    ];
    let stream = Stream::named(11, "lanes");
    for (index, action) in script.actions.iter_mut().enumerate() {
        action.lane = lanes[stream.below(index as u64, lanes.len() as u64) as usize];
    }
}

fn setup() -> Setup {
    Setup {
        microbatches: MICROBATCHES,
        schedule: split,
        edit: spread,
        ..Setup::new(DType::F32)
    }
}

fn batches(step: usize) -> Vec<Batch> {
    let ids = |name: &str, microbatch: usize| {
        let stream = Stream::named(13, &format!("{name} {step} {microbatch}"));
        let ids = Tensor::ids(&[SHAPE.batch, SHAPE.seq], VOCAB as u32, stream);
        (name.to_owned(), ids)
    };
    (0..MICROBATCHES)
        .map(|i| Batch {
            data: vec![ids("ids", i), ids("targets", i)],
            first: (i * SHAPE.batch) as i32,
        })
        .collect()
}

/// Losses and gradient norms of some steps.
fn train<E: Engine>(rig: &mut Rig<E>, steps: usize) -> Vec<(f64, f64)> {
    rig.initialise(1);
    let inverse = 1.0 / (MICROBATCHES * SHAPE.batch * SHAPE.seq) as f64;
    (0..steps)
        .map(|step| rig.step(&batches(step), 1e-3, inverse))
        .collect()
}

#[test]
fn late_calls_give_the_same_bits() {
    let (model, setup) = (tiny(), setup());
    let expected = train(&mut Rig::new(ReferenceEngine::new(), &model, &setup), 3);
    assert!(
        expected
            .iter()
            .all(|(loss, norm)| loss.is_finite() && *norm > 0.0)
    );
    for seed in 0..6 {
        let late = Late::new(ReferenceEngine::new(), seed);
        let mut rig = Rig::new(late, &model, &setup);
        assert_eq!(train(&mut rig, 3), expected, "seed {seed}");
        assert_eq!(rig.executor().engine().poisoned_reads(), 0, "seed {seed}");
    }
}

#[test]
fn an_executor_that_names_no_events_is_found_out() {
    let model = tiny();
    for seed in 0..4 {
        let late = Late::new(ReferenceEngine::new(), seed);
        let engine = Forgetful::new(late, |_| true);
        let mut rig = Rig::new(engine, &model, &setup());
        let (loss, norm) = train(&mut rig, 1)[0];
        assert!(rig.executor().engine().inner.poisoned_reads() > 0);
        assert!(
            loss.is_nan() || norm.is_nan(),
            "seed {seed}: {loss}, {norm}"
        );
    }
}

/// Reading too early is one mistake; writing too early, over what an earlier call is still to
/// read, is the other.
#[test]
fn a_write_over_what_a_queued_call_reads_is_found_out() {
    let b = Builder::new("double", DType::F32);
    b.output("y", b.data("x", DType::F32, [1]).scale(2.0));
    let program = b.finish().unwrap();
    let place = |index: usize| Span {
        offset: 4 * index,
        bytes: 4,
    };
    let mut results = BTreeSet::new();
    for seed in 0..8 {
        let mut engine = Late::new(ReferenceEngine::new(), seed);
        let kernel = engine.compile(&program, &Slots::assign(&program)).unwrap();
        engine.reserve(12).unwrap();
        engine.upload(0, &1f32.to_le_bytes()).unwrap();
        engine.upload(4, &8f32.to_le_bytes()).unwrap();
        // The first call reads place 0, the second one writes it.
        let mut launch = |from, to| {
            let args = Args {
                inputs: &[place(from)],
                outputs: &[Target {
                    span: place(to),
                    add: false,
                }],
                workspace: Span::default(),
            };
            engine.launch(&kernel, &args, Lane::Compute, &[]).unwrap()
        };
        let events = [launch(0, 2), launch(1, 0)];
        events.iter().for_each(|e| engine.wait(*e).unwrap());
        let mut bytes = [0; 4];
        engine.download(8, &mut bytes).unwrap();
        let found = (engine.poisoned_reads(), f32::from_le_bytes(bytes).is_nan());
        results.insert(found);
    }
    // Both orders came up; the wrong one was noticed, and spoilt the result.
    assert_eq!(
        results.into_iter().collect::<Vec<_>>(),
        [(0, false), (1, true)]
    );
}

/// Every single call that has to wait: one of a few orders shows that it did not.
#[test]
fn a_single_missing_edge_is_found_out() {
    let model = tiny();
    let actions = Rig::new(ReferenceEngine::new(), &model, &setup())
        .plan()
        .script
        .actions
        .len();
    // The first call waits for nothing.
    for missing in (1..actions).step_by(5) {
        let found = (0..12).any(|seed| {
            let late = Late::new(ReferenceEngine::new(), seed);
            let engine = Forgetful::new(late, move |call| call == missing);
            let mut rig = Rig::new(engine, &model, &setup());
            train(&mut rig, 1);
            rig.executor().engine().inner.poisoned_reads() > 0
        });
        assert!(found, "nobody noticed that call {missing} does not wait");
    }
}
