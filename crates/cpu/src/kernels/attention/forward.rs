//! The forward pass: scores, softmax and weighted sum of values, tile by tile.

use std::ops::Range;

use super::tile::{self, KEYS, ROWS, Running};
use super::{AttentionKernel, AttentionShape};
use crate::element::{CpuElement, CpuFloat, vectorized};
use crate::kernels::gemm::Gemm;
use crate::kernels::matrix::{Mat, MatMut};

/// Where the operands and results of the forward pass lie; all contiguous and row-major.
#[derive(Clone, Copy, Debug)]
pub struct ForwardTensors<T: CpuElement, R: CpuElement<Acc = T::Acc> = T> {
    /// Queries `[batch, queries, heads, dim]`.
    pub q: *const T,
    /// Keys `[batch, keys, kv_heads, dim]`.
    pub k: *const T,
    /// Values `[batch, keys, kv_heads, dim]`.
    pub v: *const T,
    /// Output `[batch, queries, heads, dim]`.
    pub o: *mut R,
    /// Log-sum-exp of the scaled scores `[batch, heads, queries]`.
    pub lse: *mut T::Acc,
    /// Output and log-sum-exp of an attention over other keys, which this one adds to. They may lie
    /// where the results do.
    pub before: Option<(*const R, *const T::Acc)>,
}

/// The forward operands of one pair, as matrices.
struct Operands<'a, T: CpuElement, R> {
    pair: usize,
    q: Mat<'a, T>,
    o: MatMut<'a, R>,
    lse: &'a mut [T::Acc],
    probabilities: Option<&'a mut [T]>,
    /// Whether results hold an attention over other keys, which this one adds to.
    resumed: bool,
}

impl AttentionShape {
    /// Elements of scratch for [`AttentionKernel::forward`].
    pub fn forward_scratch(&self) -> usize {
        self.scratch_over(self.keys.min(KEYS))
    }

    /// Elements of scratch for [`AttentionKernel::forward_materialised`].
    pub fn forward_materialised_scratch(&self) -> usize {
        self.scratch_over(self.keys)
    }

    fn scratch_over(&self, keys: usize) -> usize {
        2 * self.keys * self.dim + 2 * ROWS * self.dim + tile::score_len(keys)
    }
}

impl<G: Gemm> AttentionKernel<'_, G> {
    /// Computes `o` and `lse` of a range of pairs.
    ///
    /// # Safety
    /// The tensors must have the sizes of the shape, and nothing else may use the results of these
    /// pairs, or write their operands, during the call.
    ///
    /// # Panics
    /// If `scratch` is shorter than [`AttentionShape::forward_scratch`].
    pub unsafe fn forward<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        tensors: &ForwardTensors<T, R>,
        pairs: Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        // SAFETY: passed on to the caller.
        unsafe { self.forward_pairs(tensors, std::ptr::null_mut(), pairs, scratch) };
    }

    /// As [`Self::forward`], and stores the probabilities before dropout,
    /// `[batch, heads, queries, keys]`, rounded to the type of the tensors.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Panics
    /// If `scratch` is shorter than [`AttentionShape::forward_materialised_scratch`].
    pub unsafe fn forward_materialised<T: CpuElement>(
        &self,
        tensors: &ForwardTensors<T>,
        probabilities: *mut T,
        pairs: Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        // SAFETY: passed on to the caller.
        unsafe { self.forward_pairs(tensors, probabilities, pairs, scratch) };
    }

    /// # Safety
    /// As [`Self::forward`]; `probabilities` may be null.
    unsafe fn forward_pairs<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        tensors: &ForwardTensors<T, R>,
        probabilities: *mut T,
        pairs: Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        let shape = &self.shape;
        let statistics = shape.group * shape.queries;
        for pair in pairs {
            // SAFETY: the tensors have the sizes that the places of a pair are computed from; the
            // results of a pair are used here alone, and its rows of `lse` and probabilities are
            // adjacent because heads are their second dimension.
            unsafe {
                let (k, v) = (shape.key_rows(tensors.k, pair), shape.key_rows(tensors.v, pair));
                if let Some((o, lse)) = tensors.before {
                    self.resume(tensors, (o, lse), pair);
                }
                let operands = Operands {
                    resumed: tensors.before.is_some(),
                    pair,
                    q: shape.query_rows(tensors.q, pair),
                    o: shape.query_rows_mut(tensors.o, pair),
                    lse: std::slice::from_raw_parts_mut(
                        tensors.lse.add(pair * statistics),
                        statistics,
                    ),
                    probabilities: (!probabilities.is_null()).then(|| {
                        let len = statistics * shape.keys;
                        std::slice::from_raw_parts_mut(probabilities.add(pair * len), len)
                    }),
                };
                self.forward_pair(operands, k, v, scratch);
            }
        }
    }

    /// Brings what an attention over other keys gave to where the results of a pair lie.
    ///
    /// # Safety
    /// As [`Self::forward`].
    pub(super) unsafe fn resume<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        tensors: &ForwardTensors<T, R>,
        (o, lse): (*const R, *const T::Acc),
        pair: usize,
    ) {
        let (shape, statistics) = (&self.shape, self.shape.group * self.shape.queries);
        if std::ptr::eq(o, tensors.o) && std::ptr::eq(lse, tensors.lse) {
            return;
        }
        // SAFETY: both lie within their tensors, and `copy` allows that they overlap.
        unsafe {
            let width = shape.group * shape.dim;
            let (offset, [stride, _]) = shape.place(pair, shape.queries, width);
            for row in 0..shape.queries {
                let at = offset + row * stride as usize;
                std::ptr::copy(o.add(at), tensors.o.add(at), width);
            }
            let first = pair * statistics;
            std::ptr::copy(lse.add(first), tensors.lse.add(first), statistics);
        }
    }

    fn forward_pair<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        mut operands: Operands<T, R>,
        k: Mat<T>,
        v: Mat<T>,
        mut scratch: &mut [T::Acc],
    ) {
        let len = self.shape.valid_keys() * self.shape.dim;
        let k = tile::load_transposed(k, tile::take(&mut scratch, len));
        let v = tile::load(v, tile::take(&mut scratch, len));
        for head in 0..self.shape.group {
            for rows in self.shape.tiles(self.shape.queries) {
                self.forward_tile(&mut operands, head, rows, k, v, scratch);
            }
        }
    }

    fn forward_tile<T: CpuElement, R: CpuElement<Acc = T::Acc>>(
        &self,
        operands: &mut Operands<T, R>,
        head: usize,
        rows: Range<usize>,
        k: Mat<T::Acc>,
        v: Mat<T::Acc>,
        mut scratch: &mut [T::Acc],
    ) {
        let (shape, dim) = (&self.shape, self.shape.dim);
        let columns = head * dim..(head + 1) * dim;
        let q = operands.q.block(rows.clone(), columns.clone());
        let q = tile::load(q, tile::take(&mut scratch, ROWS * dim));
        let sums = &mut tile::take(&mut scratch, ROWS * dim)[..rows.len() * dim];
        sums.fill(T::Acc::ZERO);
        let mut running = [Running::EMPTY; ROWS];
        if operands.resumed {
            let o = operands.o.reborrow().block(rows.clone(), columns.clone());
            tile::load(o.as_ref(), sums);
            let lse = &operands.lse[head * shape.queries..][rows.clone()];
            for (running, lse) in running.iter_mut().zip(lse) {
                *running = Running::resumed(*lse);
            }
        }
        let mut sums = MatMut::rows_of(sums, rows.len(), dim);
        let materialised = operands.probabilities.is_some();
        // Probabilities are known only when a row is complete.
        let block = if materialised { shape.valid_keys() } else { KEYS };
        for keys in shape.key_blocks(&rows, block) {
            let k = k.block(0..dim, keys.clone());
            let mut p = tile::scores(self.gemm, q, k, scratch);
            let later = operands.resumed || keys.start > 0;
            self.softmax(&rows, (&keys, later), &mut p, &mut sums, &mut running);
            if let Some(stored) = &mut operands.probabilities {
                let stored = &mut stored[head * shape.queries * shape.keys..];
                self.materialise(&rows, &mut p, &running, stored);
            }
            self.drop((operands.pair, head), &rows, &keys, &mut p);
            let v = v.block(keys.clone(), 0..dim);
            self.gemm.multiply(sums.reborrow(), p.as_ref(), v, later);
        }
        let lse = &mut operands.lse[head * shape.queries..][rows.clone()];
        for (lse, running) in lse.iter_mut().zip(&running) {
            *lse = running.log_sum_exp();
        }
        let o = operands.o.reborrow().block(rows, columns);
        tile::store(o, sums.as_ref(), |i| match materialised {
            true => T::Acc::ONE,
            false => running[i].normaliser(),
        });
    }

    /// Turns a tile of scores into exponentials, and corrects the sums so far for the new maximum.
    pub(super) fn softmax<F: CpuFloat>(
        &self,
        rows: &Range<usize>,
        (keys, later): (&Range<usize>, bool),
        scores: &mut MatMut<F>,
        sums: &mut MatMut<F>,
        running: &mut [Running<F>; ROWS],
    ) {
        let scale = F::from_f64(self.shape.scale);
        vectorized(
            #[inline(always)]
            || {
                for (r, i) in rows.clone().enumerate() {
                    let (seen, unseen) = self.shape.split(i, keys, scores.row(r));
                    let correction = running[r].update(seen, scale);
                    unseen.fill(F::ZERO);
                    if later && correction != F::ONE {
                        sums.row(r).iter_mut().for_each(|sum| *sum *= correction);
                    }
                }
            },
        );
    }

    /// Turns the exponentials of whole rows into probabilities, as rounded in `stored`.
    fn materialise<T: CpuElement>(
        &self,
        rows: &Range<usize>,
        p: &mut MatMut<T::Acc>,
        running: &[Running<T::Acc>; ROWS],
        stored: &mut [T],
    ) {
        let stored = stored.chunks_exact_mut(self.shape.keys);
        let stored = stored.skip(rows.start).take(rows.len());
        vectorized(
            #[inline(always)]
            || {
                for (r, stored) in stored.enumerate() {
                    let normaliser = running[r].normaliser();
                    let row = p.row(r);
                    let (stored, unseen) = stored.split_at_mut(row.len());
                    for (stored, p) in stored.iter_mut().zip(row) {
                        *stored = T::store(*p * normaliser);
                        *p = stored.load();
                    }
                    unseen.fill(T::default());
                }
            },
        );
    }
}
