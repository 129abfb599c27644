//! Where elements lie: row-major strides, and the offsets that a walk over a shape visits.
//!
//! Every op that moves or contracts elements is one or two such walks, with strides that are
//! permuted, or zero where an operand is repeated.

/// The distance between neighbours along each dim, in row-major order.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect()
}

/// The offset of each element of `shape`, visited in row-major order, when a step along each dim
/// moves by its stride.
pub(crate) fn offsets(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut all = vec![0];
    for (&size, &stride) in shape.iter().zip(strides) {
        all = (all.iter()).flat_map(|&base| (0..size).map(move |i| base + i * stride)).collect();
    }
    all
}

/// The strides that visit a tensor of shape `kept` (the dims of a larger shape that are not in
/// `dims`) while walking over the larger one: zero along `dims`.
pub(crate) fn repeated(kept: &[usize], rank: usize, dims: &[usize]) -> Vec<usize> {
    let mut kept = strides(kept).into_iter();
    (0..rank)
        .map(|dim| match dims.contains(&dim) {
            true => 0,
            false => kept.next().unwrap_or(0),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walks_visit_rows_columns_and_repeats() {
        assert_eq!(strides(&[2, 3, 4]), [12, 4, 1]);
        assert_eq!(offsets(&[2, 3], &[3, 1]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(offsets(&[3, 2], &[1, 3]), [0, 3, 1, 4, 2, 5]);
        assert_eq!(offsets(&[], &[]), [0]);
        assert_eq!(offsets(&[0, 3], &[3, 1]), Vec::<usize>::new());
        let along = repeated(&[2], 2, &[1]);
        assert_eq!(offsets(&[2, 3], &along), [0, 0, 0, 1, 1, 1]);
    }
}
