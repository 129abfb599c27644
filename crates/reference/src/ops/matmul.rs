//! Products of two tensors: for every element of the result, the sum over the contracted letters.

use phalanx_ir::ops::{Matmul, PackedMatmul, Spec};

use super::{Call, apply};
use crate::error::ReferenceError;
use crate::index::{offsets, strides};
use crate::tensor::RefTensor;

pub(super) fn matmul(op: &Matmul, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (a, b) = (call.floats(0)?, call.floats(1)?);
    let [_, _, out] = op.spec.letters();
    let inner: String = op.spec.extents().inner.into_iter().collect();
    let places = walk(&op.spec, out, call);
    let terms = walk(&op.spec, &inner, call);
    let dot = |&(a0, b0): &(usize, usize)| -> f64 {
        terms.iter().map(|&(i, j)| a[a0 + i] * b[b0 + j]).sum()
    };
    let mut y: Vec<f64> = places.iter().map(dot).collect();
    if op.add {
        for (y, c) in y.iter_mut().zip(call.floats(2)?) {
            *y += c;
        }
    }
    Ok(vec![call.result(0, y)])
}

/// Each product alone.
pub(super) fn packed(op: &PackedMatmul, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let single = op.single().into();
    let one = |b: &&RefTensor| Ok(apply(&single, &[call.ins[0], b])?.swap_remove(0));
    call.ins[1..].iter().map(one).collect()
}

/// The offsets into both operands while walking over some letters, in row-major order.
fn walk(spec: &Spec, letters: &str, call: &Call<'_>) -> Vec<(usize, usize)> {
    let sizes: Vec<usize> =
        (letters.chars()).map(|c| spec.size(c, call.shape(0), call.shape(1))).collect();
    let along = |operand: usize| {
        let all = strides(call.shape(operand));
        let names = spec.letters()[operand];
        // A letter that an operand does not have has stride zero.
        let steps: Vec<usize> =
            (letters.chars()).map(|c| names.find(c).map_or(0, |dim| all[dim])).collect();
        offsets(&sizes, &steps)
    };
    along(0).into_iter().zip(along(1)).collect()
}
