//! Transposed copies.
//!
//! Products accept transposed operands, but reading a large weight across its rows is slow, and
//! every thread does it again. If several products use the transpose of a weight, a copy is worth
//! it.

use super::matrix::{Mat, MatMut};
use crate::element::{CpuElement, vectorized};

/// Stores the transpose of `from` in `to`; both have rows of adjacent elements. One thread's share
/// is a block of rows of `from` and the same columns of `to`.
///
/// # Panics
/// If the shapes do not fit, or the elements of a row are not adjacent.
pub fn transpose<T, C>(from: Mat<T>, mut to: MatMut<C>)
where
    T: CpuElement,
    C: CpuElement<Acc = T::Acc>,
{
    let [rows, cols] = from.shape();
    assert_eq!(to.shape(), [cols, rows], "the transpose of {rows}×{cols}");
    vectorized(
        #[inline(always)]
        || {
            for i in (0..rows).step_by(SIDE) {
                for j in (0..cols).step_by(SIDE) {
                    if i + SIDE <= rows && j + SIDE <= cols {
                        square(from, &mut to, i, j);
                    } else {
                        edge(from, &mut to, i, j);
                    }
                }
            }
        },
    );
}

/// Side of the squares that are transposed at once: a row of one fills a cache line.
const SIDE: usize = 16;

/// A whole square. It goes through a copy because rows a power of two apart evict each other from
/// the first cache before all their elements are used.
#[inline(always)]
fn square<T, C>(from: Mat<T>, to: &mut MatMut<C>, i: usize, j: usize)
where
    T: CpuElement,
    C: CpuElement<Acc = T::Acc>,
{
    let mut copy = [[T::default(); SIDE]; SIDE];
    for (r, line) in copy.iter_mut().enumerate() {
        line.copy_from_slice(&from.row(i + r)[j..j + SIDE]);
    }
    #[expect(clippy::needless_range_loop, reason = "it counts columns of the copy, not rows")]
    for c in 0..SIDE {
        let line: [C; SIDE] = std::array::from_fn(
            #[inline(always)]
            |r| C::store(copy[r][c].load()),
        );
        to.row(j + c)[i..i + SIDE].copy_from_slice(&line);
    }
}

/// The incomplete square at the last rows or columns.
#[inline(always)]
fn edge<T, C>(from: Mat<T>, to: &mut MatMut<C>, i: usize, j: usize)
where
    T: CpuElement,
    C: CpuElement<Acc = T::Acc>,
{
    let [rows, cols] = from.shape();
    for c in j..cols.min(j + SIDE) {
        for r in i..rows.min(i + SIDE) {
            to.row(c)[r] = C::store(from.row(r)[c].load());
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_element_moves_to_its_place() {
        for [rows, cols] in [[1, 1], [16, 16], [15, 40], [33, 17], [64, 5]] {
            let from: Vec<bf16> =
                (0..rows * cols).map(|i| bf16::from_f32((i % 251) as f32)).collect();
            let mut to = vec![f32::NAN; rows * cols];
            let out = MatMut::rows_of(&mut to, cols, rows);
            transpose(Mat::rows_of(&from, rows, cols), out);
            for (place, x) in to.iter().enumerate() {
                let (c, r) = (place / rows, place % rows);
                assert_eq!(*x, from[r * cols + c].to_f32(), "{rows}×{cols}: {r}, {c}");
            }
        }
    }
}
