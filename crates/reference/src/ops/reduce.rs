//! Sums and maxima over dims, and repetition along new ones.

use phalanx_ir::ops::{Broadcast, Reduce, ReduceKind};

use super::Call;
use crate::index::{offsets, repeated};
use crate::tensor::RefTensor;

pub(super) fn reduce(op: &Reduce, call: &Call<'_>) -> Vec<RefTensor> {
    let shape = call.shape(0);
    let places = offsets(shape, &repeated(&call.outs[0].1, shape.len(), &op.dims));
    let start = match op.kind {
        ReduceKind::Sum => 0.0,
        ReduceKind::Max => f64::NEG_INFINITY,
    };
    let mut y = vec![start; call.elements(0)];
    for (x, place) in call.ins[0].values().into_iter().zip(places) {
        let y = &mut y[place];
        *y = match op.kind {
            ReduceKind::Sum => *y + x,
            ReduceKind::Max if x.is_nan() || y.is_nan() => f64::NAN,
            ReduceKind::Max => y.max(x),
        };
    }
    vec![call.result(0, y)]
}

pub(super) fn broadcast(op: &Broadcast, call: &Call<'_>) -> Vec<RefTensor> {
    let places = repeated(call.shape(0), op.shape.len(), &op.dims);
    let data = call.ins[0].data().gather(&offsets(&op.shape, &places));
    vec![call.moved(data)]
}
