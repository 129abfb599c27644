//! The forward pass by own micro-kernels.

use std::ops::Range;

use super::{OwnAttention, inner_keys, narrow, score_stride, score_words};
use crate::element::CpuElement;
use crate::kernels::attention::ForwardTensors;
use crate::kernels::attention::tile::{self, KEYS, ROWS, Running, take};
use crate::kernels::matrix::{Mat, MatMut};
use crate::products::{Packed, PackedPart, PanelElement, packed_words};

/// What one pair's tiles are made from.
struct Operands<'a, E> {
    pair: usize,
    q: Mat<'a, E>,
    keys: Packed<'a>,
    values: Packed<'a>,
    /// Whether results hold an attention over other keys, which this one adds to.
    resumed: bool,
}

impl OwnAttention<'_> {
    /// Words of scratch for [`Self::forward`].
    pub fn forward_scratch<E: PanelElement>(&self) -> usize {
        let shape = self.shape();
        let (keys, dim) = (shape.keys, shape.dim);
        let block = keys.min(KEYS);
        let packed = packed_words::<E>(dim, keys) + packed_words::<E>(keys, dim);
        let room = self.room::<E>(&[(ROWS, [dim, 1]), (ROWS, [inner_keys::<E>(block), 1])]);
        // The rounded probabilities take at most as much room as the scores.
        packed + 2 * score_words(block) + ROWS * dim + room
    }

    /// Computes `o` and `lse` of a range of pairs.
    ///
    /// # Safety
    /// As [`AttentionKernel::forward`](crate::kernels::attention::AttentionKernel::forward).
    ///
    /// # Panics
    /// If `scratch` is shorter than [`Self::forward_scratch`].
    pub unsafe fn forward<E: PanelElement, R: CpuElement<Acc = f32>>(
        &self,
        tensors: &ForwardTensors<E, R>,
        pairs: Range<usize>,
        scratch: &mut [u32],
    ) {
        let shape = self.shape();
        let statistics = shape.group * shape.queries;
        for pair in pairs {
            let mut scratch = &mut *scratch;
            // SAFETY: the tensors have the sizes that the places of a pair are computed from, and the
            // results of a pair are used here alone.
            unsafe {
                let (k, v) = (shape.key_rows(tensors.k, pair), shape.key_rows(tensors.v, pair));
                if let Some(before) = tensors.before {
                    self.attention.resume(tensors, before, pair);
                }
                let operands = Operands {
                    pair,
                    resumed: tensors.before.is_some(),
                    q: shape.query_rows(tensors.q, pair),
                    keys: self.pack(k.t(), &mut scratch),
                    values: self.pack(v, &mut scratch),
                };
                let mut o = shape.query_rows_mut(tensors.o, pair);
                let lse = tensors.lse.add(pair * statistics);
                let lse = std::slice::from_raw_parts_mut(lse, statistics);
                for head in 0..shape.group {
                    for rows in shape.tiles(shape.queries) {
                        let columns = head * shape.dim..(head + 1) * shape.dim;
                        let o = o.reborrow().block(rows.clone(), columns);
                        let lse = &mut lse[head * shape.queries..][rows.clone()];
                        self.forward_tile(&operands, (head, rows), o, lse, scratch);
                    }
                }
            }
        }
    }

    fn forward_tile<E: PanelElement, R: CpuElement<Acc = f32>>(
        &self,
        operands: &Operands<E>,
        (head, rows): (usize, Range<usize>),
        o: MatMut<R>,
        lse: &mut [f32],
        mut scratch: &mut [u32],
    ) {
        let (shape, dim) = (self.shape(), self.shape().dim);
        let q = operands.q.block(rows.clone(), head * dim..(head + 1) * dim);
        let sums = bytemuck::cast_slice_mut(take(&mut scratch, ROWS * dim));
        let sums = &mut sums[..rows.len() * dim];
        sums.fill(0.0);
        let mut running = [Running::EMPTY; ROWS];
        if operands.resumed {
            tile::load(o.as_ref(), sums);
            for (running, lse) in running.iter_mut().zip(&*lse) {
                *running = Running::resumed(*lse);
            }
        }
        let mut sums = MatMut::rows_of(sums, rows.len(), dim);
        for keys in shape.key_blocks(&rows, KEYS).filter(|keys| !keys.is_empty()) {
            let mut scratch = &mut *scratch;
            let mut p = self.tile(rows.len(), &keys, &mut scratch);
            let part = self.key_part(operands.keys, &keys);
            let rounded = take(&mut scratch, score_words(keys.len()));
            self.product(q, part, p.reborrow(), false, scratch);
            let later = operands.resumed || keys.start > 0;
            self.attention.softmax(&rows, (&keys, later), &mut p, &mut sums, &mut running);
            self.attention.drop((operands.pair, head), &rows, &keys, &mut p);
            let (columns, inner) = (p.shape()[1], inner_keys::<E>(keys.len()));
            let rounded: &mut [E] = bytemuck::cast_slice_mut(rounded);
            let mut rounded = MatMut::new(rounded, p.shape(), [score_stride(columns), 1]);
            narrow(&p, &mut rounded);
            let part = PackedPart {
                of: operands.values,
                word: keys.start / E::PER_WORD,
                panels: 0..self.panels(dim),
            };
            let left = rounded.as_ref().block(0..rows.len(), 0..inner);
            self.product(left, part, sums.reborrow(), later, scratch);
        }
        for (lse, running) in lse.iter_mut().zip(&running) {
            *lse = running.log_sum_exp();
        }
        tile::store(o, sums.as_ref(), |i| running[i].normaliser());
    }

    /// A tile for the scores of some queries with a block of keys, in whole panels.
    pub(super) fn tile<'a>(
        &self,
        rows: usize,
        keys: &Range<usize>,
        scratch: &mut &'a mut [u32],
    ) -> MatMut<'a, f32> {
        let columns = self.panel_columns(keys);
        let memory = bytemuck::cast_slice_mut(take(scratch, score_words(keys.len())));
        MatMut::new(memory, [rows, columns], [score_stride(columns), 1])
    }

    /// A block of keys of a packed operand whose columns are keys.
    pub(super) fn key_part<'a>(&self, of: Packed<'a>, keys: &Range<usize>) -> PackedPart<'a> {
        let first = keys.start / self.unit.columns;
        let panels = first..first + self.panel_columns(keys) / self.unit.columns;
        PackedPart { of, word: 0, panels }
    }
}
