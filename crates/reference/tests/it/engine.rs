//! The interpreter as an engine: it trains from a script, and says what it can't run.

use phalanx_call::{Lane, Slots, Tier};
use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::ops::UnaryKind;
use phalanx_ir::{Builder, DType};
use phalanx_models::{Architecture, BatchShape, Mlp};
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_testing::{Rig, RigBatch, Setup, normal, suite, tensor};

use crate::support::wave;

#[test]
fn a_regression_trains() {
    let mlp = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(3, [8], 2) };
    let single = |t: RefTensor| RefTensor::new(DType::F32, t.shape(), &t.values()).unwrap();
    let data = vec![
        ("x".to_owned(), single(normal("x", &[4, 3]))),
        ("y".to_owned(), single(wave(&[4, 2], 1.0, 0.5))),
    ];
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        let model = mlp.model(BatchShape { batch: 4, seq: 1 }, dtype).unwrap();
        let mut rig = Rig::new(ReferenceEngine::new(), &model, &Setup::new(dtype));
        rig.initialise(1);
        let batch = RigBatch { data: data.clone(), first: 0 };
        let losses: Vec<f64> =
            (0..60).map(|_| rig.step(std::slice::from_ref(&batch), 0.02, 1.0 / 8.0).0).collect();
        assert!(losses[59] < 0.1 * losses[0], "{dtype}: from {} to {}", losses[0], losses[59]);
    }
}

#[test]
fn recomputation_keeps_the_bits() {
    suite::recomputation_keeps_the_bits(ReferenceEngine::new);
}

#[test]
fn a_split_backward_keeps_the_bits() {
    suite::a_split_backward_keeps_the_bits(ReferenceEngine::new);
}

/// An output is added to what its place holds, in its own type, and overlapping operands are read
/// before anything is written.
#[test]
fn results_are_added_where_asked() {
    let b = Builder::new("double", DType::Bf16);
    b.output("y", b.data("x", DType::Bf16, [2]).scale(2.0));
    let program = b.finish().unwrap();
    let mut engine = ReferenceEngine::new();
    let slots = Slots::assign_for(&program, &*engine.requirements());
    let kernel = engine.compile(&program, &slots, &[0]).unwrap();
    engine.reserve(Tier::Device, 8).unwrap();
    let narrow = |values: &[f64]| RefTensor::new(DType::Bf16, &[2], values).unwrap();
    // Beside 256, a bf16 has steps of 2: 256 + 2·0.5 is a tie, which goes to 256.
    engine.upload(Span::device(0, 4), &narrow(&[0.5, 3.0]).to_bytes()).unwrap();
    engine.upload(Span::device(4, 4), &narrow(&[256.0, 1.0]).to_bytes()).unwrap();
    let args = Args {
        inputs: &[Span::device(0, 4)],
        outputs: &[Target { span: Span::device(4, 4), add: true }],
        workspace: Span::default(),
    };
    engine.launch(&kernel, &args, Lane::Compute, &[]).unwrap();
    let mut bytes = [0; 4];
    engine.download(Span::device(4, 4), &mut bytes).unwrap();
    let found = RefTensor::from_bytes(DType::Bf16, &[2], &bytes).unwrap();
    assert_eq!(found.values(), [256.0, 7.0]);
}

#[test]
fn failures_name_the_program() {
    let b = Builder::new("lookup", DType::F64);
    let ids = b.data("ids", DType::I32, [1]);
    b.output("y", b.param("table", [2, 1]).embedding(ids));
    let program = b.finish().unwrap();
    let mut engine = ReferenceEngine::new();
    let slots = Slots::assign_for(&program, &*engine.requirements());
    let kernel = engine.compile(&program, &slots, &[0]).unwrap();
    engine.reserve(Tier::Device, 32).unwrap();
    engine
        .upload(Span::device(0, 4), &RefTensor::from_i32(&[1], &[2]).unwrap().to_bytes())
        .unwrap();
    engine.upload(Span::device(8, 16), &tensor(&[2], &[1.0, 2.0]).to_bytes()).unwrap();
    let span = Span::device;
    let outputs = [Target { span: span(24, 8), add: false }];
    let mut run = |inputs: &[Span]| {
        let args = Args { inputs, outputs: &outputs, workspace: Span::default() };
        let result = engine.launch(&kernel, &args, Lane::Compute, &[]);
        result.unwrap_err().to_string()
    };
    let error = run(&[span(0, 4), span(8, 16)]);
    assert!(error.starts_with("program `lookup`: "), "{error}");
    assert!(error.contains("the id 2"), "{error}");
    let error = run(&[span(0, 4), span(24, 16)]);
    assert!(error.contains("24 to 40"), "{error}");
}
