//! Every op alone, in every element type, overwriting and adding.

use phalanx_call::{Lane, Slots, Tier};
use phalanx_cuda::CudaEngine;
use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::ops::{
    Attention, AttentionGrad, AttentionKind, LayerNorm, LayerNormGrad, LinearCrossEntropy, Reduce,
    ReduceKind, RmsNorm, RmsNormGrad,
};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Op, Phase, Program, Role, TensorType};
use phalanx_reference::RefTensor;
use phalanx_testing::in_type;
use phalanx_testing::instances::{self, SplitPair, apply};
use phalanx_testing::threads::furthest;

use crate::gpu;

/// The results of an op on the GPU; from `before`, to which they are added where the op can.
pub(crate) fn on_gpu(
    engine: &mut CudaEngine,
    op: &Op,
    operands: &[RefTensor],
    before: f64,
) -> Vec<RefTensor> {
    let mut program = Program::new("alone", phalanx_ir::Mesh::single());
    let inputs: Vec<_> = (operands.iter().enumerate())
        .map(|(i, t)| {
            program.input(format!("in{i}"), Role::Data, TensorType::new(t.dtype(), t.shape()))
        })
        .collect();
    for (i, value) in program.push(op.clone(), &inputs, Phase::F).unwrap().into_iter().enumerate() {
        let float = program.ty(value).dtype.is_float();
        let role = if before != 0.0 && float { Role::Gradient } else { Role::Probe };
        program.output(format!("out{i}"), role, value);
    }
    run(engine, &program, operands, before)
}

/// The results of a program on the GPU; gradients are added to `before`.
pub(crate) fn run(
    engine: &mut CudaEngine,
    program: &Program,
    operands: &[RefTensor],
    before: f64,
) -> Vec<RefTensor> {
    let slots = Slots::assign_for(program, &*engine.requirements());
    let kernel = engine.compile(program, &slots, &[0]).unwrap();
    let mut end = 0;
    let mut place = |ty: &TensorType| {
        let span = Span::device(end, ty.bytes());
        end = span.end().next_multiple_of(64);
        span
    };
    let ins: Vec<Span> = program.inputs().iter().map(|p| place(program.ty(p.value))).collect();
    let outs: Vec<Target> = (program.outputs().iter())
        .map(|p| Target { span: place(program.ty(p.value)), add: p.role == Role::Gradient })
        .collect();
    let workspace = Span::device(end, slots.extent);
    engine.reserve(Tier::Device, workspace.end()).unwrap();
    // Everything that nobody writes is not a number.
    engine.upload(Span::device(0, workspace.end()), &vec![0xFF; workspace.end()]).unwrap();
    for (tensor, span) in operands.iter().zip(&ins) {
        engine.upload(*span, &tensor.to_bytes()).unwrap();
    }
    let types: Vec<TensorType> =
        program.outputs().iter().map(|p| program.ty(p.value).clone()).collect();
    for (ty, target) in types.iter().zip(&outs).filter(|(_, target)| target.add) {
        let old = RefTensor::new(ty.dtype, &ty.shape, &vec![before; ty.elements()]).unwrap();
        engine.upload(target.span, &old.to_bytes()).unwrap();
    }
    let args = Args { inputs: &ins, outputs: &outs, workspace };
    let event = engine.launch(&kernel, &args, Lane::Compute, &[]).unwrap();
    engine.wait(event).unwrap();
    let read = |(ty, target): (&TensorType, &Target)| {
        let mut bytes = vec![0; target.span.bytes];
        engine.download(target.span, &mut bytes).unwrap();
        RefTensor::from_bytes(ty.dtype, &ty.shape, &bytes).unwrap()
    };
    types.iter().zip(&outs).map(read).collect()
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        _ => 3e-2,
    }
}

/// An op in every element type, overwriting and adding; says what is wrong.
fn check(engine: &mut CudaEngine, op: &Op, given: &[RefTensor]) -> Vec<String> {
    let mut wrong = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
        let (op, operands) = in_type(op, given, dtype);
        let expected = apply(&op, &operands);
        for before in [0.0, 0.75] {
            let found = on_gpu(engine, &op, &operands, before);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let more = if expected.dtype().is_float() { before } else { 0.0 };
                let values: Vec<f64> = expected.values().iter().map(|x| x + more).collect();
                let expected = RefTensor::new(expected.dtype(), expected.shape(), &values).unwrap();
                let off = furthest(found, &expected);
                if off > tolerance(dtype) {
                    wrong.push(format!(
                        "{op:?} in {dtype}, before {before}: result {i} is off by {off:e}"
                    ));
                }
            }
        }
    }
    wrong
}

#[test]
fn every_op_in_every_type() {
    if !gpu::is_here("every_op_in_every_type") {
        return;
    }
    let mut engine = CudaEngine::new().unwrap();
    let mut wrong = Vec::new();
    for case in instances::every() {
        let operands: Vec<RefTensor> = case.operands.iter().map(|(t, _)| t.clone()).collect();
        wrong.extend(check(&mut engine, &case.op, &operands));
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn split_masters_are_updated_like_whole_ones() {
    if !gpu::is_here("split_masters_are_updated_like_whole_ones") {
        return;
    }
    let mut engine = CudaEngine::new().unwrap();
    for SplitPair { whole, split } in SplitPair::all() {
        let [whole, halves] =
            [&whole, &split].map(|(op, operands)| on_gpu(&mut engine, op, operands, 0.0));
        assert!(SplitPair::agree(&whole, &halves), "{:?}", split.0);
    }
}

/// Sizes that kernels read several elements of at a time, and more rows than a block takes.
#[test]
fn even_sizes_in_every_type() {
    if !gpu::is_here("even_sizes_in_every_type") {
        return;
    }
    let f64s =
        |name: &str, shape: &[usize]| RefTensor::normal(DType::F64, shape, Stream::named(7, name));
    let ids = |bound| RefTensor::ids(&[37], bound, Stream::named(7, "ids"));
    let (x, dy) = (f64s("x", &[37, 48]), f64s("dy", &[37, 48]));
    let (gain, bias) = (f64s("gain", &[48]), f64s("bias", &[48]));
    let (rms, layer): (Op, Op) = (RmsNorm { eps: 1e-3 }.into(), LayerNorm { eps: 1e-3 }.into());
    let of_rms = apply(&rms, &[x.clone(), gain.clone()]).swap_remove(1);
    let of_layer = apply(&layer, &[x.clone(), gain.clone(), bias.clone()]);
    let (q, k) = (f64s("q", &[2, 70, 4, 40]), f64s("k", &[2, 70, 2, 40]));
    let of = Attention { kind: AttentionKind::Flash, causal: true, dropout: 0.0, site: 1 };
    let kept = apply(&of.into(), &[q.clone(), k.clone(), k.clone()]);
    let sum =
        |dims: &[usize]| Reduce { kind: ReduceKind::Sum, dims: dims.to_vec(), out: DType::F64 };
    let out = DType::F64;
    let cases: Vec<(Op, Vec<RefTensor>)> = vec![
        (rms, vec![x.clone(), gain.clone()]),
        (RmsNormGrad { out }.into(), vec![x.clone(), gain.clone(), of_rms, dy.clone()]),
        (layer, vec![x.clone(), gain.clone(), bias]),
        (
            LayerNormGrad { out }.into(),
            vec![x.clone(), gain, of_layer[1].clone(), of_layer[2].clone(), dy],
        ),
        (sum(&[0]).into(), vec![x.clone()]),
        (sum(&[0, 1]).into(), vec![f64s("y", &[30, 50, 16])]),
        (
            LinearCrossEntropy { transposed: true, chunk: 8, out }.into(),
            vec![x, f64s("w", &[64, 48]), ids(64), RefTensor::scalar(out, 0.3)],
        ),
        (of.into(), vec![q.clone(), k.clone(), k.clone()]),
        (
            AttentionGrad { of }.into(),
            vec![q.clone(), k.clone(), k, kept[0].clone(), kept[1].clone(), q],
        ),
    ];
    let mut engine = CudaEngine::new().unwrap();
    let wrong: Vec<String> =
        (cases.iter()).flat_map(|(op, operands)| check(&mut engine, op, operands)).collect();
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
