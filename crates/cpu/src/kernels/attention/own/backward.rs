//! The backward pass by own micro-kernels.

use std::ops::Range;

use super::{OwnAttention, inner_keys, narrow, score_stride, score_words};
use crate::element::{CpuElement, vectorized};
use crate::kernels::attention::tile::{self, KEYS, ROWS, take};
use crate::kernels::attention::{BackwardTensors, backward::clear};
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::row;
use crate::products::{PANEL_COLUMNS, Packed, PackedPart, PanelElement, packed_words};

/// Queries over which the gradients of keys and values are summed at once: whole tiles.
const STRIP: usize = 4 * ROWS;

/// Keys whose gradients are computed at once, over the queries of a strip that see some of them.
const STRIP_KEYS: usize = 96;

/// What one pair's tiles are made from.
struct Operands<'a, E> {
    pair: usize,
    q: Mat<'a, E>,
    o: Mat<'a, E>,
    d_o: Mat<'a, E>,
    lse: &'a [f32],
    /// As right operands: keys and values whose columns are positions, and keys whose rows are.
    keys: Packed<'a>,
    values: Packed<'a>,
    key_rows: Packed<'a>,
}

/// What the tiles of a strip of queries of one head leave for the gradients of a block of keys.
struct Strip<'a, E> {
    head: usize,
    rows: Range<usize>,
    /// Queries and gradients of the output as right operands, whose rows are the strip's.
    q: Packed<'a>,
    d_o: Packed<'a>,
    /// Rounded probabilities and gradients of scores.
    p: MatMut<'a, E>,
    ds: MatMut<'a, E>,
}

/// Sums of the gradients of the keys and values of one pair.
struct Sums<'a> {
    dk: MatMut<'a, f32>,
    dv: MatMut<'a, f32>,
}

impl OwnAttention<'_> {
    /// Words of scratch for [`Self::backward`].
    pub fn backward_scratch<E: PanelElement>(&self) -> usize {
        let shape = self.shape();
        let (keys, dim) = (shape.keys, shape.dim);
        let block = keys.min(KEYS);
        let packed = 2 * packed_words::<E>(dim, keys) + packed_words::<E>(keys, dim);
        let strip = 2 * packed_words::<E>(STRIP, dim) + 2 * strip_words::<E>(block);
        let inner = inner_keys::<E>(block);
        let room = self.room::<E>(&[
            (ROWS, [dim, 1]),
            (ROWS, [inner, 1]),
            (STRIP_KEYS, [STRIP.next_multiple_of(E::PER_WORD), 0]),
        ]);
        let sums = 2 * keys * dim + STRIP * dim;
        packed + strip + sums + 2 * score_words(block) + room
    }

    /// Computes `dq`, `dk` and `dv` of a range of pairs, from `lse`.
    ///
    /// # Safety
    /// As [`AttentionKernel::backward`](crate::kernels::attention::AttentionKernel::backward).
    ///
    /// # Panics
    /// If `scratch` is shorter than [`Self::backward_scratch`].
    pub unsafe fn backward<E: PanelElement, R: CpuElement<Acc = f32>>(
        &self,
        tensors: &BackwardTensors<E, R>,
        pairs: Range<usize>,
        scratch: &mut [u32],
    ) {
        for pair in pairs {
            // SAFETY: the caller's.
            unsafe { self.backward_pair(tensors, pair, scratch) };
        }
    }

    /// # Safety
    /// As [`Self::backward`].
    unsafe fn backward_pair<E: PanelElement, R: CpuElement<Acc = f32>>(
        &self,
        tensors: &BackwardTensors<E, R>,
        pair: usize,
        mut scratch: &mut [u32],
    ) {
        let (shape, dim) = (self.shape(), self.shape().dim);
        let statistics = shape.group * shape.queries;
        // SAFETY: the tensors have the sizes that the places of a pair are computed from, and the results of
        // a pair are used here alone.
        let (operands, mut dq, dk, dv) = unsafe {
            let (k, v) = (shape.key_rows(tensors.k, pair), shape.key_rows(tensors.v, pair));
            let operands = Operands {
                pair,
                q: shape.query_rows(tensors.q, pair),
                o: shape.query_rows(tensors.o, pair),
                d_o: shape.query_rows(tensors.d_o, pair),
                lse: std::slice::from_raw_parts(tensors.lse.add(pair * statistics), statistics),
                keys: self.pack(k.t(), &mut scratch),
                values: self.pack(v.t(), &mut scratch),
                key_rows: self.pack(k, &mut scratch),
            };
            let dq = shape.query_rows_mut(tensors.dq, pair);
            let (dk, dv) =
                (shape.key_rows_mut(tensors.dk, pair), shape.key_rows_mut(tensors.dv, pair));
            (operands, dq, dk, dv)
        };
        let len = shape.valid_keys() * dim;
        let (for_keys, for_values) =
            bytemuck::cast_slice_mut(take(&mut scratch, 2 * len)).split_at_mut(len);
        let mut before_dq = None;
        for_keys.fill(0.0);
        for_values.fill(0.0);
        if let Some([dq, dk, dv]) = tensors.before {
            // SAFETY: what is added has the sizes of the gradients. Where it is the same memory, that of
            // keys and values is read here, before it is written, and that of queries strip by strip.
            unsafe {
                before_dq = Some(shape.query_rows(dq, pair));
                tile::load(shape.key_rows(dk, pair), for_keys);
                tile::load(shape.key_rows(dv, pair), for_values);
            }
        }
        let mut sums = Sums {
            dk: MatMut::rows_of(for_keys, shape.valid_keys(), dim),
            dv: MatMut::rows_of(for_values, shape.valid_keys(), dim),
        };
        // Queries that are padding add nothing to the gradients of keys and values.
        let queries = shape.valid_queries();
        let columns = |head: usize| head * dim..(head + 1) * dim;
        for head in 0..shape.valid_group() {
            let mut tiles = shape.tiles(queries).peekable();
            while let Some(first) = tiles.next() {
                let mut rows = first;
                while let Some(next) = tiles.next_if(|next| next.end - rows.start <= STRIP) {
                    rows.end = next.end;
                }
                let before = before_dq.map(|dq| dq.block(rows.clone(), columns(head)));
                let dq = (dq.reborrow().block(rows.clone(), columns(head)), before);
                self.backward_strip(&operands, (head, rows), dq, &mut sums, scratch);
            }
        }
        clear(&mut dq, queries..shape.queries);
        for head in shape.valid_group()..shape.group {
            clear(&mut dq.reborrow().block(0..queries, columns(head)), 0..queries);
        }
        for (mut gradient, sums) in [(dk, sums.dk), (dv, sums.dv)] {
            clear(&mut gradient, shape.valid_keys()..shape.keys);
            tile::store(gradient, sums.as_ref(), |_| 1.0);
        }
    }

    /// The tiles of some neighbouring queries of a head.
    fn backward_strip<E: PanelElement, R: CpuElement<Acc = f32>>(
        &self,
        operands: &Operands<E>,
        (head, rows): (usize, Range<usize>),
        (dq, before): (MatMut<R>, Option<Mat<R>>),
        sums: &mut Sums<'_>,
        mut scratch: &mut [u32],
    ) {
        let (shape, dim) = (self.shape(), self.shape().dim);
        let columns = head * dim..(head + 1) * dim;
        let [q, d_o] = [operands.q, operands.d_o]
            .map(|of| self.pack(of.block(rows.clone(), columns.clone()), &mut scratch));
        let dq_sums = bytemuck::cast_slice_mut(take(&mut scratch, STRIP * dim));
        dq_sums.fill(0.0);
        if let Some(before) = before {
            tile::load(before, dq_sums);
        }
        let mut dq_sums = MatMut::new(dq_sums, [rows.len(), dim], [dim, 1]);
        for keys in shape.key_blocks(&rows, KEYS).filter(|keys| !keys.is_empty()) {
            let mut scratch = &mut *scratch;
            let columns = self.panel_columns(&keys);
            let mut rounded = || {
                let memory = take(&mut scratch, strip_words::<E>(keys.len()));
                let memory = bytemuck::cast_slice_mut(memory);
                MatMut::new(memory, [rows.len(), columns], [score_stride(columns), 1])
            };
            let (p, ds) = (rounded(), rounded());
            let mut strip = Strip { head, rows: rows.clone(), q, d_o, p, ds };
            for tile in shape.tiles(rows.end).filter(|tile| tile.start >= rows.start) {
                let to = tile.start - rows.start..tile.end - rows.start;
                let dq = dq_sums.reborrow().block(to, 0..dim);
                self.backward_tile(operands, &mut strip, (tile, &keys), dq, scratch);
            }
            self.add_strip(&strip, &keys, sums, scratch);
        }
        tile::store(dq, dq_sums.as_ref(), |_| 1.0);
    }

    /// One tile of queries with a block of keys: probabilities and gradients of scores into their strip, and
    /// what they add to the gradient of the queries.
    fn backward_tile<'a, E: PanelElement>(
        &self,
        operands: &Operands<'a, E>,
        strip: &mut Strip<E>,
        (rows, keys): (Range<usize>, &Range<usize>),
        dq: MatMut<f32>,
        mut scratch: &mut [u32],
    ) {
        let (shape, dim, head) = (self.shape(), self.shape().dim, strip.head);
        let to = rows.start - strip.rows.start..rows.end - strip.rows.start;
        let columns = strip.p.shape()[1];
        let mut to_p = strip.p.reborrow().block(to.clone(), 0..columns);
        let mut to_ds = strip.ds.reborrow().block(to, 0..columns);
        let end = shape.visible(rows.end - 1).min(keys.end);
        if end <= keys.start {
            clear(&mut to_p, 0..rows.len());
            return clear(&mut to_ds, 0..rows.len());
        }
        let seen = keys.start..end;
        let own = |of: Mat<'a, E>| of.block(rows.clone(), head * dim..(head + 1) * dim);
        let (q, o, d_o) = (own(operands.q), own(operands.o), own(operands.d_o));
        let (mut p, mut ds) = (
            self.tile(rows.len(), &seen, &mut scratch),
            self.tile(rows.len(), &seen, &mut scratch),
        );
        self.product(q, self.key_part(operands.keys, &seen), p.reborrow(), false, scratch);
        self.exponentials(operands, (head, &rows), &seen, &mut p);
        self.product(d_o, self.key_part(operands.values, &seen), ds.reborrow(), false, scratch);
        let mut offsets = [0.0; ROWS];
        vectorized(
            #[inline(always)]
            || {
                for (r, offset) in offsets.iter_mut().take(rows.len()).enumerate() {
                    *offset = row::dot(o.row(r), d_o.row(r));
                }
            },
        );
        let place = (operands.pair, head);
        self.attention.drop(place, &rows, &seen, &mut ds);
        self.attention.score_gradients(&p, &mut ds, &offsets);
        self.attention.drop(place, &rows, &seen, &mut p);
        narrow(&p, &mut to_p);
        narrow(&ds, &mut to_ds);
        let part = PackedPart {
            of: operands.key_rows,
            word: keys.start / E::PER_WORD,
            panels: 0..self.panels(dim),
        };
        let left = to_ds.as_ref().block(0..rows.len(), 0..inner_keys::<E>(seen.len()));
        self.product(left, part, dq, true, scratch);
    }

    /// Turns scores into probabilities.
    fn exponentials<E: PanelElement>(
        &self,
        operands: &Operands<E>,
        (head, rows): (usize, &Range<usize>),
        keys: &Range<usize>,
        p: &mut MatMut<f32>,
    ) {
        let shape = self.shape();
        let (scale, lse) = (shape.scale as f32, &operands.lse[head * shape.queries..]);
        vectorized(
            #[inline(always)]
            || {
                for (r, i) in rows.clone().enumerate() {
                    let (seen, unseen) = shape.split(i, keys, p.row(r));
                    row::exp_in_place(seen, scale, lse[i]);
                    unseen.fill(0.0);
                }
            },
        );
    }

    /// What a strip of queries adds to the gradients of a block of keys and values.
    fn add_strip<E: PanelElement>(
        &self,
        strip: &Strip<E>,
        keys: &Range<usize>,
        sums: &mut Sums<'_>,
        scratch: &mut [u32],
    ) {
        let (shape, dim) = (self.shape(), self.shape().dim);
        for start in keys.clone().step_by(STRIP_KEYS) {
            let own = start..keys.end.min(start + STRIP_KEYS);
            // Whole tiles before the first query that sees one of these keys add nothing.
            let tiles = shape.tiles(strip.rows.end).filter(|tile| tile.start >= strip.rows.start);
            let blind = tiles.take_while(|tile| shape.visible(tile.end - 1) <= own.start);
            let first = blind.last().map_or(0, |tile| tile.end - strip.rows.start);
            // A word must not be cut.
            let first = first / E::PER_WORD * E::PER_WORD;
            if first >= strip.rows.len() {
                continue;
            }
            let columns = own.start - keys.start..own.end - keys.start;
            for (left, right, to) in
                [(&strip.p, strip.d_o, &mut sums.dv), (&strip.ds, strip.q, &mut sums.dk)]
            {
                let left = left.as_ref().block(first..strip.rows.len(), columns.clone()).t();
                let (word, panels) = (first / E::PER_WORD, 0..self.panels(dim));
                let part = PackedPart { of: right, word, panels };
                let to = to.reborrow().block(own.clone(), 0..dim);
                self.product(left, part, to, true, scratch);
            }
        }
    }
}

/// Words of one matrix of a strip over so many keys.
fn strip_words<E: PanelElement>(keys: usize) -> usize {
    STRIP * score_stride(keys.next_multiple_of(PANEL_COLUMNS)) / E::PER_WORD
}
