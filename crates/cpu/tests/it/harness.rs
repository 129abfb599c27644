//! Runs a program on the CPU engine and on the reference interpreter with the same inputs.

use phalanx_cpu::CpuEngine;
use phalanx_cpu::products::{ProductUnits, UnitSet};
use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Instr, Op, Program, Role, TensorType};
use phalanx_reference::RefTensor;
use phalanx_script::{Lane, Slots, Tier};

/// Random inputs: normal floats, ids below `vocab`, small positive scalars, a random key.
pub(crate) fn inputs(program: &Program, vocab: u32, seed: u64) -> Vec<(String, RefTensor)> {
    (program.inputs().iter())
        .map(|port| {
            let ty = program.ty(port.value);
            let stream = Stream::named(seed, &port.name);
            let tensor = match (ty.dtype, port.role) {
                (DType::I32, Role::Random) => {
                    RefTensor::from_i32(&ty.shape, &[7, 1, 3, 2, 40]).unwrap()
                }
                (DType::I32, _) => RefTensor::ids(&ty.shape, vocab, stream),
                (dtype, Role::Scalar) => RefTensor::scalar(dtype, 0.25),
                // Small weights, as models have: else 16-bit rounding drowns everything.
                (dtype, Role::Param) => {
                    let values = RefTensor::normal(dtype, &ty.shape, stream).values();
                    let small: Vec<f64> = values.iter().map(|x| 0.2 * x).collect();
                    RefTensor::new(dtype, &ty.shape, &small).unwrap()
                }
                (dtype, _) => RefTensor::normal(dtype, &ty.shape, stream),
            };
            (port.name.clone(), tensor)
        })
        .collect()
}

/// The outputs of the CPU engine; `add` starts every output from what `before` holds.
pub(crate) fn on_cpu(
    program: &Program,
    inputs: &[(String, RefTensor)],
    threads: usize,
    before: Option<&[RefTensor]>,
) -> Vec<RefTensor> {
    on_engine(CpuEngine::new(threads).unwrap(), program, inputs, before)
}

/// The same where every product that can be one is an own one.
pub(crate) fn on_own_products(
    program: &Program,
    inputs: &[(String, RefTensor)],
    threads: usize,
    before: Option<&[RefTensor]>,
) -> Vec<RefTensor> {
    let products = ProductUnits::every(UnitSet::here());
    on_engine(CpuEngine::new(threads).unwrap().with_products(products), program, inputs, before)
}

fn on_engine(
    mut engine: CpuEngine,
    program: &Program,
    inputs: &[(String, RefTensor)],
    before: Option<&[RefTensor]>,
) -> Vec<RefTensor> {
    let slots = Slots::assign_for(program, &*engine.requirements());
    let kernel = engine.compile(program, &slots, &[0]).unwrap();
    let mut end = 0;
    let mut place = |ty: &TensorType| {
        let span = Span::device(end, ty.bytes());
        end = (end + span.bytes).next_multiple_of(64);
        span
    };
    let ins: Vec<Span> = program.inputs().iter().map(|p| place(program.ty(p.value))).collect();
    let outs: Vec<Target> = (program.outputs().iter())
        .map(|p| Target {
            span: place(program.ty(p.value)),
            // Only gradients and cotangents are ever added to.
            add: before.is_some() && matches!(p.role, Role::Gradient | Role::Cotangent),
        })
        .collect();
    let workspace = Span::device(end, slots.extent);
    engine.reserve(Tier::Device, workspace.end()).unwrap();
    for ((_, tensor), span) in inputs.iter().zip(&ins) {
        engine.upload(*span, &tensor.to_bytes()).unwrap();
    }
    // Everything else starts as garbage.
    engine.upload(workspace, &vec![0xFF; slots.extent]).unwrap();
    for (index, target) in outs.iter().enumerate() {
        let bytes = match before {
            Some(tensors) if target.add => tensors[index].to_bytes(),
            _ => vec![0xFF; target.span.bytes],
        };
        engine.upload(target.span, &bytes).unwrap();
    }
    let args = Args { inputs: &ins, outputs: &outs, workspace };
    let event = engine.launch(&kernel, &args, Lane::Compute, &[]).unwrap();
    engine.wait(event).unwrap();
    (program.outputs().iter().zip(&outs))
        .map(|(port, target)| {
            let ty = program.ty(port.value);
            let mut bytes = vec![0; target.span.bytes];
            engine.download(target.span, &mut bytes).unwrap();
            RefTensor::from_bytes(ty.dtype, &ty.shape, &bytes).unwrap()
        })
        .collect()
}

/// The outputs of the reference interpreter.
pub(crate) fn on_reference(program: &Program, inputs: &[(String, RefTensor)]) -> Vec<RefTensor> {
    let named: Vec<(&str, RefTensor)> =
        inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let outputs = phalanx_reference::run(program, &named).unwrap();
    outputs.into_iter().map(|(_, tensor)| tensor).collect()
}

/// The largest difference, relative to the largest entry or, if that is larger, to `floor`: a
/// gradient that is zero but for rounding is judged by the size of the others.
pub(crate) fn distance(a: &RefTensor, b: &RefTensor, floor: f64) -> f64 {
    let (a, b) = (a.values(), b.values());
    let scale = b.iter().fold(floor.max(1e-300), |m, x| m.max(x.abs()));
    let difference = |(x, y): (&f64, &f64)| if x == y { 0.0 } else { (x - y).abs() };
    let differences = a.iter().zip(&b).map(difference);
    differences.fold(0.0f64, |m, d| if d.is_nan() { d } else { m.max(d) }) / scale
}

/// The root mean square over all of these tensors' elements.
pub(crate) fn root_mean_square(tensors: &[RefTensor]) -> f64 {
    let values: Vec<f64> = tensors.iter().flat_map(RefTensor::values).collect();
    (values.iter().map(|x| x * x).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// Checks a program on several numbers of threads, overwriting and adding.
pub(crate) fn check(program: &Program, vocab: u32, tolerance: f64) {
    phalanx_ir::verify(program).unwrap();
    let inputs = inputs(program, vocab, 11);
    let expected = on_reference(program, &inputs);
    let floor = root_mean_square(&expected);
    let close = |got: &[RefTensor], expected: &[RefTensor], how: &str| {
        for ((port, got), expected) in program.outputs().iter().zip(got).zip(expected) {
            let d = distance(got, expected, floor);
            assert!(d <= tolerance, "{how}: `{}` is off by {d:e}\n{program}", port.name);
        }
    };
    let multiplies = |instr: &Instr| {
        matches!(
            instr.op,
            Op::Matmul(_)
                | Op::PackedMatmul(_)
                | Op::GroupedMatmul(_)
                | Op::GroupedMatmulGrad(_)
                | Op::Attention(_)
                | Op::AttentionGrad(_)
                | Op::Attend(_)
                | Op::AttendGrad(_)
                | Op::KeyProduct(_)
                | Op::LinearCrossEntropy(_)
        )
    };
    let multiplies = program.instrs().iter().any(multiplies);
    for (threads, own) in [(1, false), (2, false), (3, false), (1, true), (4, true)] {
        if own && !multiplies {
            continue;
        }
        let run = if own { on_own_products } else { on_cpu };
        let got = run(program, &inputs, threads, None);
        close(&got, &expected, &format!("{threads} threads, own products: {own}"));
        let added = run(program, &inputs, threads, Some(&expected));
        let doubled: Vec<RefTensor> = (program.outputs().iter().zip(&expected))
            .map(|(port, t)| match port.role {
                Role::Gradient | Role::Cotangent => {
                    let twice: Vec<f64> = t.values().iter().map(|x| 2.0 * x).collect();
                    RefTensor::new(t.dtype(), t.shape(), &twice).unwrap()
                }
                _ => t.clone(),
            })
            .collect();
        close(&added, &doubled, &format!("{threads} threads, adding, own products: {own}"));
    }
}

/// The tolerance of an element type, for sums of some hundred terms.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        _ => 3e-2,
    }
}
