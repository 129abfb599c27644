//! Ops that only move elements.

use phalanx_ir::ops::{Concat, Pad, Slice, Transpose};

use super::Call;
use crate::index::{offsets, strides};
use crate::tensor::RefTensor;

pub(super) fn transpose(op: &Transpose, call: &Call<'_>) -> Vec<RefTensor> {
    let old = strides(call.shape(0));
    let new: Vec<usize> = op.perm.iter().map(|&dim| old[dim]).collect();
    let data = call.ins[0].data().gather(&offsets(&call.outs[0].1, &new));
    vec![call.moved(data)]
}

pub(super) fn slice(op: &Slice, call: &Call<'_>) -> Vec<RefTensor> {
    let strides = strides(call.shape(0));
    let places: Vec<usize> = (offsets(&call.outs[0].1, &strides).iter())
        .map(|place| place + op.start * strides[op.dim])
        .collect();
    vec![call.moved(call.ins[0].data().gather(&places))]
}

pub(super) fn pad(op: &Pad, call: &Call<'_>) -> Vec<RefTensor> {
    placed(call, op.dim, op.before)
}

pub(super) fn concat(op: &Concat, call: &Call<'_>) -> Vec<RefTensor> {
    placed(call, op.dim, 0)
}

/// Zeros of the result's shape, with the operands put one after the other from `start` of a dim.
fn placed(call: &Call<'_>, dim: usize, mut start: usize) -> Vec<RefTensor> {
    let strides = strides(&call.outs[0].1);
    let mut y = vec![0.0; call.elements(0)];
    for operand in call.ins {
        let places = offsets(operand.shape(), &strides);
        for (x, place) in operand.values().into_iter().zip(places) {
            y[place + start * strides[dim]] = x;
        }
        start += operand.shape()[dim];
    }
    vec![call.result(0, y)]
}
