//! Segments of real models, numbers for their inputs, and chains of phases.

use std::collections::BTreeMap;

use phalanx_autodiff::Phases;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Port, Program, Role};
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::{RefTensor, run};
use phalanx_testing::{VOCAB, gpt, llama, mlp};

pub(crate) const SHAPE: BatchShape = BatchShape { batch: 2, seq: 5 };

/// The forward programs of all segments that the architectures are made of.
pub(crate) fn segments(compute: DType) -> Vec<(String, Program)> {
    let mut all = Vec::new();
    for attention in [AttentionKind::Flash, AttentionKind::Materialised] {
        for tied in [false, true] {
            add(&mut all, &format!("{attention} tied {tied}"), compute, &llama(attention, tied));
        }
        for dropout in [0.0, 0.3] {
            add(
                &mut all,
                &format!("{attention} dropout {dropout}"),
                compute,
                &gpt(attention, dropout),
            );
        }
    }
    add(&mut all, "tanh", compute, &mlp());
    all
}

fn add(
    all: &mut Vec<(String, Program)>,
    variant: &str,
    compute: DType,
    architecture: &dyn Architecture,
) {
    let model = architecture.model(SHAPE, compute).unwrap();
    for program in model.segments() {
        // Embedding and head do not depend on the attention; once is enough.
        let known = all.iter().any(|(_, p)| p == program);
        if !known {
            let name = format!("{} {} ({variant})", architecture.name(), program.name);
            all.push((name, program.clone()));
        }
    }
}

/// Numbers for every input of a program, and for the cotangents of its boundary outputs.
pub(crate) fn numbers(forward: &Program) -> BTreeMap<String, RefTensor> {
    let mut all: BTreeMap<String, RefTensor> =
        (forward.inputs().iter()).map(|port| (port.name.clone(), number(forward, port))).collect();
    for port in forward.outputs_with(Role::Boundary) {
        let ty = forward.ty(port.value);
        let name = format!("d.{}", port.name);
        let stream = Stream::named(31, &name);
        all.insert(name, RefTensor::normal(ty.dtype, &ty.shape, stream));
    }
    all
}

fn number(program: &Program, port: &Port) -> RefTensor {
    let ty = program.ty(port.value);
    let stream = Stream::named(29, &port.name);
    let normal = |scale: f64, shift: f64| {
        let values = RefTensor::normal(DType::F64, &ty.shape, stream).values();
        let values: Vec<f64> = values.iter().map(|x| x * scale + shift).collect();
        RefTensor::new(ty.dtype, &ty.shape, &values).unwrap()
    };
    match (port.role, port.name.as_str()) {
        (_, "key") => RefTensor::from_i32(&[5], &[1, 2, 3, 4, 5]).unwrap(),
        (_, "ids") => RefTensor::ids(&ty.shape, VOCAB as u32, stream),
        (_, "targets") => {
            let mut ids = RefTensor::ids(&ty.shape, VOCAB as u32, stream).values();
            ids[1] = -100.0;
            RefTensor::new(DType::I32, &ty.shape, &ids).unwrap()
        }
        (Role::Scalar, _) => RefTensor::scalar(ty.dtype, 0.125),
        (Role::Param, _) if ty.shape.len() == 1 => normal(0.2, 1.0),
        (Role::Param, _) => normal(0.4, 0.0),
        _ => normal(1.0, 0.0),
    }
}

/// What a program gives, by role and name.
pub(crate) type Results = BTreeMap<(Role, String), RefTensor>;

/// Runs programs one after the other: what one keeps (its residuals) later ones read. Nothing is
/// given twice.
pub(crate) fn chain(programs: &[&Program], numbers: &BTreeMap<String, RefTensor>) -> Results {
    let mut known = numbers.clone();
    let mut results = Results::new();
    for program in programs {
        let inputs: Vec<(&str, RefTensor)> =
            (program.inputs().iter()).map(|p| (p.name.as_str(), known[&p.name].clone())).collect();
        let outputs = run(program, &inputs).unwrap();
        for (port, (name, value)) in program.outputs().iter().zip(outputs) {
            let before = match port.role {
                Role::Residual => known.insert(name, value),
                role => results.insert((role, name), value),
            };
            assert!(before.is_none(), "`{}` is given twice", port.name);
        }
    }
    results
}

/// Fails unless two results have the same names and the same bits.
pub(crate) fn assert_same_bits(found: &Results, expected: &Results, what: &str) {
    let names = |results: &Results| results.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (key, value) in found {
        assert_eq!(
            value.to_bytes(),
            expected[key].to_bytes(),
            "{what}: {} `{}`",
            key.0.name(),
            key.1
        );
    }
}

/// Every chain of phases that computes a segment and its gradients.
pub(crate) fn chains(phases: &Phases) -> [(&'static str, Vec<&Program>); 3] {
    let Phases { f, b, w, bw, fbw } = phases;
    [("FBW", vec![fbw]), ("F, BW", vec![f, bw]), ("F, B, W", vec![f, b, w])]
}

/// The element types that programs are computed in, each with one that gradients are kept in.
pub(crate) const DTYPES: [(DType, DType); 4] = [
    (DType::F64, DType::F64),
    (DType::F32, DType::F32),
    (DType::Bf16, DType::F32),
    (DType::Bf16, DType::Bf16),
];
