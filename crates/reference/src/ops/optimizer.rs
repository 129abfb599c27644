//! Optimizer updates, as PyTorch or their papers define them.

use phalanx_ir::halves;
use phalanx_ir::ops::{AdamW, Decay, LambDirection, Lion, Narrow, Sgd};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn adamw(op: &AdamW, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (mut w, g, at) = weights(op.narrow, call)?;
    let (mut m, mut v) = (call.floats(at)?.to_vec(), call.floats(at + 1)?.to_vec());
    let (lr, step, clip) = (call.scalar(at + 2)?, call.scalar(at + 3)?, call.scalar(at + 4)?);
    if stops(call, at + 5)? {
        return Ok(updated(op.narrow, call, vec![w, m, v]));
    }
    for i in 0..w.len() {
        let (mut g, rate) = (g[i] * clip, decay(&op.decay, i));
        match op.coupled {
            true => g += rate * w[i],
            false => w[i] -= lr * rate * w[i],
        }
        m[i] = op.beta1 * m[i] + (1.0 - op.beta1) * g;
        v[i] = op.beta2 * v[i] + (1.0 - op.beta2) * g * g;
        let first = m[i] / (1.0 - op.beta1.powf(step));
        let second = v[i] / (1.0 - op.beta2.powf(step));
        w[i] -= lr * first / (second.sqrt() + op.eps);
    }
    Ok(updated(op.narrow, call, vec![w, m, v]))
}

/// The direction, and both moments.
pub(super) fn lamb(op: &LambDirection, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (w, g) = (call.floats(0)?, call.floats(1)?);
    let (mut m, mut v) = (call.floats(2)?.to_vec(), call.floats(3)?.to_vec());
    let (step, clip) = (call.scalar(5)?, call.scalar(6)?);
    let mut u = vec![0.0; w.len()];
    if stops(call, 7)? {
        return Ok(updated(Narrow::None, call, vec![u, m, v]));
    }
    for i in 0..w.len() {
        let g = g[i] * clip;
        m[i] = op.beta1 * m[i] + (1.0 - op.beta1) * g;
        v[i] = op.beta2 * v[i] + (1.0 - op.beta2) * g * g;
        let first = m[i] / (1.0 - op.beta1.powf(step));
        let second = v[i] / (1.0 - op.beta2.powf(step));
        u[i] = first / (second.sqrt() + op.eps) + decay(&op.decay, i) * w[i];
    }
    Ok(updated(Narrow::None, call, vec![u, m, v]))
}

pub(super) fn lion(op: &Lion, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (mut w, g, at) = weights(op.narrow, call)?;
    let mut m = call.floats(at)?.to_vec();
    let (lr, clip) = (call.scalar(at + 1)?, call.scalar(at + 3)?);
    if stops(call, at + 4)? {
        return Ok(updated(op.narrow, call, vec![w, m]));
    }
    for i in 0..w.len() {
        let g = g[i] * clip;
        let mean = op.beta1 * m[i] + (1.0 - op.beta1) * g;
        let sign = if mean == 0.0 { 0.0 } else { mean.signum() };
        w[i] -= lr * (sign + decay(&op.decay, i) * w[i]);
        m[i] = op.beta2 * m[i] + (1.0 - op.beta2) * g;
    }
    Ok(updated(op.narrow, call, vec![w, m]))
}

pub(super) fn sgd(op: &Sgd, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (mut w, g, at) = weights(op.narrow, call)?;
    let mut momentum = call.floats(at)?.to_vec();
    let (lr, clip) = (call.scalar(at + 1)?, call.scalar(at + 3)?);
    if stops(call, at + 4)? {
        return Ok(updated(op.narrow, call, vec![w, momentum]));
    }
    for i in 0..w.len() {
        let g = g[i] * clip + decay(&op.decay, i) * w[i];
        momentum[i] = op.momentum * momentum[i] + g;
        w[i] -= match op.nesterov {
            true => lr * (g + op.momentum * momentum[i]),
            false => lr * momentum[i],
        };
    }
    Ok(updated(op.narrow, call, vec![w, momentum]))
}

pub(super) fn sum_squares(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let sum = call.floats(0)?.iter().map(|x| x * x).sum();
    Ok(vec![call.result(0, vec![sum])])
}

/// Whether the operand with this index is there and says that nothing changes.
fn stops(call: &Call<'_>, go: usize) -> Result<bool, ReferenceError> {
    Ok(call.ins.len() > go && call.scalar(go)? == 0.0)
}

/// The decay of one element.
fn decay(decay: &Decay, element: usize) -> f64 {
    if element % decay.block < decay.first { decay.rate } else { 0.0 }
}

/// The weights in full precision, the gradient, and the index of the first state.
fn weights<'c>(
    narrow: Narrow,
    call: &'c Call<'_>,
) -> Result<(Vec<f64>, &'c [f64], usize), ReferenceError> {
    let (w, g) = (call.floats(0)?, call.floats(1)?);
    if narrow != Narrow::Split {
        return Ok((w.to_vec(), g, 2));
    }
    let lower = call.ins[2].values();
    let join = |(&upper, &lower): (&f64, &f64)| {
        let upper = ((upper as f32).to_bits() >> 16) as u16;
        f64::from(halves::join(upper, lower as u16))
    };
    Ok((w.iter().zip(&lower).map(join).collect(), g, 3))
}

/// The new state and, where the op gives one, a narrower copy of the new weights as they are
/// stored, or both halves of them.
fn updated(narrow: Narrow, call: &Call<'_>, mut state: Vec<Vec<f64>>) -> Vec<RefTensor> {
    if narrow == Narrow::Split {
        let split = state[0].iter().map(|&w| halves::split(w as f32));
        let (upper, lower): (Vec<f64>, Vec<f64>) = split
            .map(|(upper, lower)| (f64::from(halves::join(upper, 0)), f64::from(lower)))
            .unzip();
        state.splice(..1, [upper, lower]);
    }
    let mut results: Vec<RefTensor> =
        (state.into_iter().enumerate()).map(|(i, values)| call.result(i, values)).collect();
    if let Narrow::Copy(dtype) = narrow {
        let (_, shape) = &call.outs[results.len()];
        results.push(RefTensor::rounded(dtype, shape, results[0].values()));
    }
    results
}
