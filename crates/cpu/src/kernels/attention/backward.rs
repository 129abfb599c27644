//! The backward pass: recomputes the probabilities, then the gradients of queries, keys and values.
//!
//! With `P` the probabilities, `M` the factors of dropout and `D` the sums over the head of
//! `dO∘O`, row by row: `dS = P∘(M∘(dO·Vᵀ) − D)·scale`, `dQ = dS·K`, `dK = dSᵀ·Q`,
//! `dV = (P∘M)ᵀ·dO`. Gradients of keys and values are summed over the heads and tiles in one fixed
//! order by the one thread that owns the pair.

use std::ops::Range;

use super::tile::{self, KEYS, ROWS};
use super::{AttentionKernel, AttentionShape};
use crate::element::{CpuElement, CpuFloat, vectorized};
use crate::kernels::gemm::Gemm;
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::row;

/// Where the operands and results of the backward pass lie; all contiguous and row-major, with the
/// shapes of [`super::ForwardTensors`].
#[derive(Clone, Copy, Debug)]
pub struct BackwardTensors<T: CpuElement, R: CpuElement<Acc = T::Acc> = T> {
    /// Queries.
    pub q: *const T,
    /// Keys.
    pub k: *const T,
    /// Values.
    pub v: *const T,
    /// Output of the forward pass.
    pub o: *const T,
    /// Log-sum-exp of the forward pass.
    pub lse: *const T::Acc,
    /// Gradient of the output.
    pub d_o: *const T,
    /// Gradient of the queries; overwritten.
    pub dq: *mut R,
    /// Gradient of the keys; overwritten.
    pub dk: *mut R,
    /// Gradient of the values; overwritten.
    pub dv: *mut R,
    /// What is added to the three gradients. It may lie where they do.
    pub before: Option<[*const R; 3]>,
}

/// What the forward pass kept of a pair's probabilities.
#[derive(Clone, Copy)]
enum Kept<'a, T: CpuElement> {
    /// Only their log-sum-exp, from which they are recomputed.
    LogSumExp(&'a [T::Acc]),
    /// All of them.
    Stored(&'a [T]),
}

/// What is read row by row for one pair.
struct Operands<'a, T: CpuElement> {
    pair: usize,
    q: Mat<'a, T>,
    o: Mat<'a, T>,
    d_o: Mat<'a, T>,
    kept: Kept<'a, T>,
}

/// Keys and values of one pair, laid out for the products.
struct LaidOut<'a, F> {
    keys: Mat<'a, F>,
    keys_transposed: Mat<'a, F>,
    values_transposed: Mat<'a, F>,
}

/// Sums of the gradients of the keys and values of one pair.
struct Sums<'a, F> {
    dk: MatMut<'a, F>,
    dv: MatMut<'a, F>,
}

impl AttentionShape {
    /// Elements of scratch for [`AttentionKernel::backward`].
    pub fn backward_scratch(&self) -> usize {
        let tiles = 2 * tile::score_len(self.keys.min(KEYS));
        5 * self.keys * self.dim + 4 * ROWS * self.dim + tiles
    }
}

impl<G: Gemm> AttentionKernel<'_, G> {
    /// Computes `dq`, `dk` and `dv` of a range of pairs, from `lse`.
    ///
    /// # Safety
    /// The tensors must have the sizes of the shape, and nothing else may use the results of these
    /// pairs, or write their operands, during the call.
    ///
    /// # Panics
    /// If `scratch` is shorter than [`AttentionShape::backward_scratch`].
    pub unsafe fn backward<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        tensors: &BackwardTensors<T, R>,
        pairs: Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        let statistics = self.shape.group * self.shape.queries;
        for pair in pairs {
            // SAFETY: the log-sum-exps of a pair are adjacent; the rest is the caller's promise.
            unsafe {
                let lse = tensors.lse.add(pair * statistics);
                let lse = std::slice::from_raw_parts(lse, statistics);
                self.backward_pair(tensors, pair, Kept::LogSumExp(lse), scratch);
            }
        }
    }

    /// Computes `dq`, `dk` and `dv` of a range of pairs, from the stored probabilities.
    ///
    /// # Safety
    /// As for [`Self::backward`]; `lse` is not read.
    ///
    /// # Panics
    /// If `scratch` is shorter than [`AttentionShape::backward_scratch`].
    pub unsafe fn backward_materialised<T: CpuElement>(
        &self,
        tensors: &BackwardTensors<T>,
        probabilities: *const T,
        pairs: Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        let len = self.shape.group * self.shape.queries * self.shape.keys;
        for pair in pairs {
            // SAFETY: the probabilities of a pair are adjacent; the rest is the caller's promise.
            unsafe {
                let stored = std::slice::from_raw_parts(probabilities.add(pair * len), len);
                self.backward_pair(tensors, pair, Kept::Stored(stored), scratch);
            }
        }
    }

    /// # Safety
    /// As for [`Self::backward`].
    unsafe fn backward_pair<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        tensors: &BackwardTensors<T, R>,
        pair: usize,
        kept: Kept<T>,
        mut scratch: &mut [T::Acc],
    ) {
        let shape = &self.shape;
        // SAFETY: the tensors have the sizes that the places of a pair are computed from, and the
        // results of a pair are used here alone.
        let (operands, k, v, mut dq, dk, dv) = unsafe {
            let operands = Operands {
                pair,
                q: shape.query_rows(tensors.q, pair),
                o: shape.query_rows(tensors.o, pair),
                d_o: shape.query_rows(tensors.d_o, pair),
                kept,
            };
            let (k, v) = (shape.key_rows(tensors.k, pair), shape.key_rows(tensors.v, pair));
            let (dk, dv) =
                (shape.key_rows_mut(tensors.dk, pair), shape.key_rows_mut(tensors.dv, pair));
            let dq = shape.query_rows_mut(tensors.dq, pair);
            (operands, k, v, dq, dk, dv)
        };
        let len = shape.valid_keys() * shape.dim;
        let keys = tile::load(k, tile::take(&mut scratch, len));
        let laid_out = LaidOut {
            keys,
            keys_transposed: tile::load_transposed(keys, tile::take(&mut scratch, len)),
            values_transposed: tile::load_transposed(v, tile::take(&mut scratch, len)),
        };
        let sums = tile::take(&mut scratch, 2 * len);
        sums.fill(T::Acc::ZERO);
        let (for_keys, for_values) = sums.split_at_mut(len);
        let mut before_dq = None;
        if let Some([dq, dk, dv]) = tensors.before {
            // SAFETY: what is added has the sizes of the gradients. Where it is the same memory, that
            // of keys and values is read here, before it is written, and that of queries tile by tile.
            unsafe {
                tile::load(shape.key_rows(dk, pair), for_keys);
                tile::load(shape.key_rows(dv, pair), for_values);
                before_dq = Some(shape.query_rows(dq, pair));
            }
        }
        let mut sums = Sums {
            dk: MatMut::rows_of(for_keys, shape.valid_keys(), shape.dim),
            dv: MatMut::rows_of(for_values, shape.valid_keys(), shape.dim),
        };
        // Queries that are padding add nothing to the gradients of keys and values.
        let queries = shape.valid_queries();
        let columns = |head: usize| head * shape.dim..(head + 1) * shape.dim;
        for head in 0..shape.valid_group() {
            for rows in shape.tiles(queries) {
                let before = before_dq.map(|dq| dq.block(rows.clone(), columns(head)));
                let dq = (dq.reborrow().block(rows.clone(), columns(head)), before);
                self.backward_tile(&operands, &laid_out, (head, rows), dq, &mut sums, scratch);
            }
        }
        clear(&mut dq, queries..shape.queries);
        for head in shape.valid_group()..shape.group {
            clear(&mut dq.reborrow().block(0..queries, columns(head)), 0..queries);
        }
        for (mut gradient, sums) in [(dk, sums.dk), (dv, sums.dv)] {
            clear(&mut gradient, shape.valid_keys()..shape.keys);
            tile::store(gradient, sums.as_ref(), |_| T::Acc::ONE);
        }
    }

    fn backward_tile<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        operands: &Operands<T>,
        laid_out: &LaidOut<T::Acc>,
        (head, rows): (usize, Range<usize>),
        (dq, before): (MatMut<R>, Option<Mat<R>>),
        sums: &mut Sums<T::Acc>,
        mut scratch: &mut [T::Acc],
    ) {
        let (gemm, shape, dim) = (self.gemm, &self.shape, self.shape.dim);
        let mut load = |from: Mat<T>| {
            let from = from.block(rows.clone(), head * dim..(head + 1) * dim);
            tile::load(from, tile::take(&mut scratch, ROWS * dim))
        };
        let (q, o, d_o) = (load(operands.q), load(operands.o), load(operands.d_o));
        let mut offsets = [T::Acc::ZERO; ROWS];
        vectorized(
            #[inline(always)]
            || {
                for (r, offset) in offsets.iter_mut().take(rows.len()).enumerate() {
                    *offset = row::dot(o.row(r), d_o.row(r));
                }
            },
        );
        let dq_sums = &mut tile::take(&mut scratch, ROWS * dim)[..rows.len() * dim];
        if let Some(before) = before {
            tile::load(before, dq_sums);
        }
        let mut dq_sums = MatMut::rows_of(dq_sums, rows.len(), dim);
        for keys in shape.key_blocks(&rows, KEYS) {
            let mut scratch = &mut *scratch;
            let half = tile::take(&mut scratch, tile::score_len(keys.len()));
            let mut p = self.probabilities(operands, laid_out, (head, &rows), &keys, q, half);
            let values = laid_out.values_transposed.block(0..dim, keys.clone());
            let mut ds = tile::scores(gemm, d_o, values, scratch);
            self.drop((operands.pair, head), &rows, &keys, &mut ds);
            self.score_gradients(&p, &mut ds, &offsets);
            self.drop((operands.pair, head), &rows, &keys, &mut p);
            let block = laid_out.keys.block(keys.clone(), 0..dim);
            gemm.multiply(
                dq_sums.reborrow(),
                ds.as_ref(),
                block,
                before.is_some() || keys.start > 0,
            );
            let dv = sums.dv.reborrow().block(keys.clone(), 0..dim);
            gemm.multiply(dv, p.as_ref().t(), d_o, true);
            let dk = sums.dk.reborrow().block(keys, 0..dim);
            gemm.multiply(dk, ds.as_ref().t(), q, true);
        }
        tile::store(dq, dq_sums.as_ref(), |_| T::Acc::ONE);
    }

    /// A tile of probabilities before dropout.
    fn probabilities<'a, T: CpuElement>(
        &self,
        operands: &Operands<T>,
        laid_out: &LaidOut<T::Acc>,
        (head, rows): (usize, &Range<usize>),
        keys: &Range<usize>,
        q: Mat<T::Acc>,
        out: &'a mut [T::Acc],
    ) -> MatMut<'a, T::Acc> {
        let shape = &self.shape;
        let first = head * shape.queries + rows.start;
        match operands.kept {
            Kept::LogSumExp(lse) => {
                let block = laid_out.keys_transposed.block(0..shape.dim, keys.clone());
                let mut p = tile::scores(self.gemm, q, block, out);
                let scale = T::Acc::from_f64(shape.scale);
                vectorized(
                    #[inline(always)]
                    || {
                        for (r, i) in rows.clone().enumerate() {
                            let (seen, unseen) = shape.split(i, keys, p.row(r));
                            row::exp_in_place(seen, scale, lse[first + r]);
                            unseen.fill(T::Acc::ZERO);
                        }
                    },
                );
                p
            }
            Kept::Stored(stored) => {
                let stored = Mat::rows_of(&stored[first * shape.keys..], rows.len(), shape.keys);
                let stored = stored.block(0..rows.len(), keys.clone());
                let strides = [tile::score_stride(keys.len()), 1];
                let mut p = MatMut::new(out, [rows.len(), keys.len()], strides);
                for r in 0..rows.len() {
                    for (p, stored) in p.row(r).iter_mut().zip(stored.row(r)) {
                        *p = stored.load();
                    }
                }
                p
            }
        }
    }

    /// Turns the gradients of the probabilities into those of the scores before scaling.
    pub(super) fn score_gradients<F: CpuFloat>(
        &self,
        p: &MatMut<F>,
        ds: &mut MatMut<F>,
        offsets: &[F; ROWS],
    ) {
        let scale = F::from_f64(self.shape.scale);
        let p = p.as_ref();
        vectorized(
            #[inline(always)]
            || {
                for (r, offset) in offsets.iter().take(p.shape()[0]).enumerate() {
                    for (ds, p) in ds.row(r).iter_mut().zip(p.row(r)) {
                        *ds = *p * (*ds - *offset) * scale;
                    }
                }
            },
        );
    }
}

/// Zeros for rows of padding.
pub(super) fn clear<T: CpuElement>(gradient: &mut MatMut<T>, rows: Range<usize>) {
    rows.for_each(|row| gradient.row(row).fill(T::default()));
}
