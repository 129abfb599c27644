//! Rotation of each head's pairs by its position.

use phalanx_ir::ops::Rotary;

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn rotary(op: &Rotary, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, shape) = (call.floats(0)?, call.shape(0));
    let (sequence, heads, d) = (shape[1], shape[2], shape[3]);
    let frequencies = op.frequencies(d);
    let mut y = vec![0.0; x.len()];
    for (head, start) in (0..x.len()).step_by(d.max(1)).enumerate() {
        let position = head / heads % sequence;
        for (i, frequency) in frequencies.iter().enumerate() {
            let angle = position as f64 * frequency;
            let (sin, cos) = (if op.inverse { -angle } else { angle }).sin_cos();
            let (first, second) = (start + i, start + i + d / 2);
            y[first] = x[first] * cos - x[second] * sin;
            y[second] = x[second] * cos + x[first] * sin;
        }
    }
    Ok(vec![call.result(0, y)])
}
