//! Softmax of rows.

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn softmax(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let mut y = Vec::new();
    for row in call.floats(0)?.chunks(call.width(0).max(1)) {
        let total = log_sum_exp(row);
        y.extend(row.iter().map(|x| (x - total).exp()));
    }
    Ok(vec![call.result(0, y)])
}

pub(super) fn softmax_grad(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (y, dy, n) = (call.floats(0)?, call.floats(1)?, call.width(0).max(1));
    let mut dx = Vec::new();
    for (y, dy) in y.chunks(n).zip(dy.chunks(n)) {
        let along: f64 = y.iter().zip(dy).map(|(y, dy)| y * dy).sum();
        dx.extend(y.iter().zip(dy).map(|(y, dy)| y * (dy - along)));
    }
    Ok(vec![call.result(0, dx)])
}

/// log Σ exp(x), with the largest taken out so that nothing overflows; −∞ of no numbers.
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return top;
    }
    top + x.iter().map(|x| (x - top).exp()).sum::<f64>().ln()
}
