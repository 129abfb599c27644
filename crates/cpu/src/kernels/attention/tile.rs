//! Tiles: the pieces of scratch that one thread works in, and the passes over their rows.

use std::ops::Range;

use super::AttentionShape;
use crate::element::{CpuElement, CpuFloat, vectorized};
use crate::kernels::gemm::Gemm;
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::row;
use crate::kernels::transpose::transpose;

/// Query rows per tile. A multiple of six, which the library's kernel takes at once, and at most 64,
/// where it packs neither operand of the products with keys and values. Fewer waste less of the
/// causal diagonal but make every product smaller; 32, 36 and 64 were slower.
pub(super) const ROWS: usize = 48;

/// Keys per tile: the scores of one tile are 100 KiB in single precision, within the second cache.
pub(super) const KEYS: usize = 512;

/// Distance between the rows of a tile of scores. A power of two would put the elements of a column
/// into a few sets of the first cache.
pub(super) fn score_stride(keys: usize) -> usize {
    keys.next_multiple_of(16) + 16
}

/// Elements of a tile of scores over `keys` keys.
pub(super) fn score_len(keys: usize) -> usize {
    ROWS * score_stride(keys)
}

/// Takes the first `len` elements off `scratch`.
pub(super) fn take<'a, F>(scratch: &mut &'a mut [F], len: usize) -> &'a mut [F] {
    let (front, rest) = std::mem::take(scratch).split_at_mut(len);
    *scratch = rest;
    front
}

/// Loads a matrix row by row.
pub(super) fn load<'a, T: CpuElement>(from: Mat<T>, to: &'a mut [T::Acc]) -> Mat<'a, T::Acc> {
    let [rows, cols] = from.shape();
    vectorized(
        #[inline(always)]
        || {
            for (i, line) in to.chunks_exact_mut(cols).take(rows).enumerate() {
                for (o, x) in line.iter_mut().zip(from.row(i)) {
                    *o = x.load();
                }
            }
        },
    );
    Mat::rows_of(to, rows, cols)
}

/// Loads the transpose of a matrix, row-major: `[cols, rows]`.
pub(super) fn load_transposed<'a, T: CpuElement>(
    from: Mat<T>,
    to: &'a mut [T::Acc],
) -> Mat<'a, T::Acc> {
    let [rows, cols] = from.shape();
    transpose(from, MatMut::rows_of(to, cols, rows));
    Mat::rows_of(to, cols, rows)
}

/// Stores floats into a matrix whose rows are adjacent elements, each row times its factor.
pub(super) fn store<T: CpuElement>(
    mut to: MatMut<T>,
    from: Mat<T::Acc>,
    factor: impl Fn(usize) -> T::Acc,
) {
    vectorized(
        #[inline(always)]
        || {
            for i in 0..from.shape()[0] {
                let factor = factor(i);
                for (o, x) in to.row(i).iter_mut().zip(from.row(i)) {
                    *o = T::store(*x * factor);
                }
            }
        },
    );
}

/// The tile of scores (not yet scaled) of `queries` with a block of transposed keys.
pub(super) fn scores<'a, F: CpuFloat, G: Gemm>(
    gemm: &G,
    queries: Mat<F>,
    keys_transposed: Mat<F>,
    out: &'a mut [F],
) -> MatMut<'a, F> {
    let shape = [queries.shape()[0], keys_transposed.shape()[1]];
    let mut out = MatMut::new(out, shape, [score_stride(shape[1]), 1]);
    gemm.multiply(out.reborrow(), queries, keys_transposed, false);
    out
}

/// The running maximum and sum of the exponentials of one row.
#[derive(Clone, Copy)]
pub(super) struct Running<F> {
    pub(super) max: F,
    pub(super) sum: F,
}

impl<F: CpuFloat> Running<F> {
    pub(super) const EMPTY: Self = Self { max: F::NEG_INFINITY, sum: F::ZERO };

    /// Goes on from an attention over other keys, whose result counts once.
    pub(super) fn resumed(log_sum_exp: F) -> Self {
        match log_sum_exp == F::NEG_INFINITY {
            true => Self::EMPTY,
            false => Self { max: log_sum_exp, sum: F::ONE },
        }
    }

    /// Takes in a row of scores, replacing them by exponentials relative to the new maximum.
    /// Returns what everything relative to the old maximum must be multiplied with.
    #[inline(always)]
    pub(super) fn update(&mut self, scores: &mut [F], scale: F) -> F {
        if scores.is_empty() {
            return F::ONE;
        }
        let max = (row::maximum(scores) * scale).maximum(self.max);
        let correction = (self.max - max).exp();
        self.sum = self.sum * correction + row::exp_in_place(scores, scale, max);
        self.max = max;
        correction
    }

    /// The logarithm of the sum of exponentials; negative infinity if there was no score.
    pub(super) fn log_sum_exp(self) -> F {
        self.max + self.sum.ln()
    }

    /// What turns the exponentials into probabilities; zero if there was no score.
    pub(super) fn normaliser(self) -> F {
        if self.sum == F::ZERO { F::ZERO } else { F::ONE / self.sum }
    }
}

impl AttentionShape {
    /// Splits a row of a tile into the keys that query `i` sees and those it does not.
    #[inline(always)]
    pub(super) fn split<'a, F>(
        &self,
        i: usize,
        keys: &Range<usize>,
        row: &'a mut [F],
    ) -> (&'a mut [F], &'a mut [F]) {
        let seen = self.visible(i).saturating_sub(keys.start).min(row.len());
        row.split_at_mut(seen)
    }
}
