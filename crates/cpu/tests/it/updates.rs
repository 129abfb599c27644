//! Optimizer updates.

use phalanx_ir::ops::{AdamW, Decay, Narrow, Sgd};
use phalanx_ir::{Builder, DType, OpDef, Role, TensorType};
use phalanx_reference::RefTensor;
use phalanx_testing::instances::{self as cases, OpInstance, SplitPair};

use crate::harness::{check, on_cpu, on_reference, tolerance};

#[test]
fn updates() {
    for (state, grads, narrow) in [
        (DType::F64, DType::F64, Narrow::None),
        (DType::F32, DType::F32, Narrow::None),
        (DType::F32, DType::F32, Narrow::Copy(DType::Bf16)),
        (DType::F32, DType::Bf16, Narrow::Copy(DType::Bf16)),
    ] {
        let b = Builder::new("updates", state);
        let unit = |name: &str, dtype| b.input(name, Role::State, TensorType::unit(dtype, 500));
        let (w, g, m) = (unit("w", state), unit("g", grads), unit("m", state));
        let v = unit("v", state).square();
        let scalars = [b.scalar("lr"), b.constant(state, [], 3.0), b.scalar("clip")];
        let adamw = AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: Decay::all(0.1),
            coupled: false,
            narrow,
        };
        let results = b.apply_all(adamw, &[&[w, g, m, v][..], &scalars].concat());
        for (i, value) in results.into_iter().enumerate() {
            b.port(&format!("adamw{i}"), Role::State, value);
        }
        for nesterov in [false, true] {
            let sgd = Sgd { momentum: 0.9, nesterov, decay: Decay::all(0.1), narrow };
            let results = b.apply_all(sgd, &[&[w, g, m][..], &scalars].concat());
            for (i, value) in results.into_iter().enumerate() {
                b.port(&format!("sgd{nesterov}{i}"), Role::State, value);
            }
        }
        let tolerance = if narrow != Narrow::None { 1e-2 } else { tolerance(state) };
        check(&b.finish().unwrap(), 10, tolerance);
    }
}

#[test]
fn split_masters_are_updated_like_whole_ones() {
    for SplitPair { whole, split } in SplitPair::all() {
        for threads in [1, 3] {
            let [whole, halves] = [&whole, &split].map(|(op, operands)| {
                let (program, inputs) = cases::alone(op, operands);
                on_cpu(&program, &inputs, threads, None)
            });
            assert!(SplitPair::agree(&whole, &halves), "{:?}, {threads} threads", split.0);
        }
    }
}

/// The padding of a unit is updated like the rest, and must stay zero.
#[test]
fn updates_map_zeros_to_zeros() {
    for case in cases::every().iter().filter(|case| case.op.is_update()) {
        for (dtype, step) in [(DType::F64, 1.0), (DType::F64, 3.0), (DType::F32, 1.0)] {
            let (program, inputs) = cases::alone(&case.op, &zeros(case, dtype, step));
            for results in [on_reference(&program, &inputs), on_cpu(&program, &inputs, 2, None)] {
                let all_zero = results.iter().flat_map(RefTensor::values).all(|x| x == 0.0);
                assert!(all_zero, "{} in step {step}: {results:?}", case.op.name());
            }
        }
    }
}

/// Weights, gradient and states of zeros; then lr, step and clip.
fn zeros(case: &OpInstance, dtype: DType, step: f64) -> Vec<RefTensor> {
    // Masters in halves have types of their own.
    let split = case.operands.iter().any(|(t, _)| t.dtype() == DType::U16);
    let own = |t: &RefTensor| if split { t.dtype() } else { dtype };
    let of = |(t, _): &(RefTensor, Role)| match t.shape() {
        [] => RefTensor::scalar(own(t), t.values()[0]),
        shape => RefTensor::new(own(t), shape, &vec![0.0; t.values().len()]).unwrap(),
    };
    let mut operands: Vec<RefTensor> = case.operands.iter().map(of).collect();
    let at = operands.iter().position(|t| t.shape().is_empty()).unwrap() + 1;
    operands[at] = RefTensor::scalar(operands[at].dtype(), step);
    operands
}
