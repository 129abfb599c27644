//! Members of a packed unit, element by element.

use phalanx_ir::ops::Bounds;

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn squares(bounds: &Bounds, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let mut sums = vec![0.0; bounds.members.len()];
    for (i, x) in call.floats(0)?.iter().enumerate() {
        if let Some(member) = member(bounds, i) {
            sums[member] += x * x;
        }
    }
    Ok(vec![call.result(0, sums)])
}

pub(super) fn scale(bounds: &Bounds, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, factors) = (call.floats(0)?, call.floats(1)?);
    let scaled = |(i, x): (usize, &f64)| match member(bounds, i) {
        Some(member) => x * factors[member],
        None => *x,
    };
    Ok(vec![call.result(0, x.iter().enumerate().map(scaled).collect())])
}

/// The member that an element of the whole unit belongs to.
fn member(bounds: &Bounds, element: usize) -> Option<usize> {
    let at = element % bounds.block;
    bounds.members.iter().position(|&(begin, end)| begin <= at && at < end)
}
