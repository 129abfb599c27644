//! Scaled dot-product attention, forward and backward, in tiles of query rows.
//!
//! A *pair* is one sequence and one key-value head; the query heads of its group are computed with
//! it, so that keys and values are loaded once and their gradients have one owner. Pairs are
//! independent, and a thread's share is a range of them.
//!
//! [`AttentionKernel::forward`] keeps only the log-sum-exp of every row and [`AttentionKernel::backward`]
//! recomputes the probabilities from it. The `_materialised` variants store the probabilities.

mod backward;
mod dropout;
mod forward;
mod own;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

pub use backward::BackwardTensors;
pub use forward::ForwardTensors;
pub use own::OwnAttention;

use phalanx_ir::{LocalPart, Order};

use super::dropout::Mask;
use super::matrix::{Mat, MatMut};
use tile::ROWS;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Number of sequences.
    pub batch: usize,
    /// Query positions per sequence.
    pub queries: usize,
    /// Key positions per sequence.
    pub keys: usize,
    /// Number of key-value heads.
    pub kv_heads: usize,
    /// Query heads per key-value head: query head `kv_head * group + i` attends to `kv_head`.
    pub group: usize,
    /// Size of a head.
    pub dim: usize,
    /// Whether query `i` sees only the keys up to `i + keys − queries`.
    pub causal: bool,
    /// Factor of the scores; positive.
    pub scale: f64,
    /// Which part of the whole this rank holds; `None` means all of it, without padding.
    pub held: Option<AttentionPart>,
}

/// Which part of an attention a rank holds: of the queries, and of the keys that it attends to now.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPart {
    /// The part of the sequences.
    pub batch: LocalPart,
    /// The part of the query positions.
    pub positions: LocalPart,
    /// The part of the query heads.
    pub heads: LocalPart,
    /// Query positions per sequence over all ranks, padding not counted.
    pub queries: usize,
    /// The part of the key positions that is here.
    pub key_positions: LocalPart,
    /// Key positions that are here, padding not counted; they are the first.
    pub keys_here: usize,
    /// Key positions per sequence over all parts, padding not counted.
    pub keys: usize,
    /// Query heads per key-value head here, padding not counted: heads of one group may be padded.
    pub group: usize,
}

/// One attention operation: its shape, its dropout and the library for its products.
#[derive(Clone, Copy, Debug)]
pub struct AttentionKernel<'a, G> {
    /// The sizes of an attention.
    pub shape: AttentionShape,
    /// Dropout on the probabilities; a sequence is a sample.
    pub dropout: Option<Mask>,
    /// The library for the products.
    pub gemm: &'a G,
}

impl AttentionShape {
    /// Number of query heads.
    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Number of pairs of a sequence and a key-value head, which shares are ranges of.
    pub fn pairs(&self) -> usize {
        self.batch * self.kv_heads
    }

    /// Key positions here without padding.
    #[inline(always)]
    fn valid_keys(&self) -> usize {
        self.held.map_or(self.keys, |held| held.keys_here)
    }

    /// Key positions of whole sequences.
    #[inline(always)]
    fn all_keys(&self) -> usize {
        self.held.map_or(self.keys, |held| held.keys)
    }

    /// Query heads per key-value head without padding; they are the first.
    fn valid_group(&self) -> usize {
        self.held.map_or(self.group, |held| held.group)
    }

    /// Query positions here without padding; they are the first.
    fn valid_queries(&self) -> usize {
        self.held.map_or(self.queries, |held| held.positions.valid(held.queries))
    }

    /// The place of query `i` in the whole sequence, and how many queries that has.
    #[inline(always)]
    fn position(&self, i: usize) -> (usize, usize) {
        match self.held {
            None => (i, self.queries),
            Some(held) => (held.positions.global(i), held.queries),
        }
    }

    /// How many keys, from the first that is here, query `i` sees. The places of keys increase in
    /// every order, so those that it sees are always the first ones.
    #[inline(always)]
    fn visible(&self, i: usize) -> usize {
        if !self.causal {
            return self.valid_keys();
        }
        let keys = self.all_keys();
        let (i, queries) = self.position(i);
        let seen = (i + 1 + keys).saturating_sub(queries).min(keys);
        match self.held {
            Some(held) if held.key_positions.shards > 1 => held.key_positions.valid(seen),
            _ => seen,
        }
    }

    /// How many keys from one on are neighbours in the whole sequence, and the place of the first.
    #[inline(always)]
    fn key_run(&self, key: usize) -> (usize, usize) {
        match self.held {
            Some(held) => (held.key_positions.run(key), held.key_positions.global(key)),
            None => (self.keys - key, key),
        }
    }

    /// Tiles of query rows: none of them crosses a seam in the order of the positions, or its last
    /// row would see far more keys than its first.
    fn tiles(&self, queries: usize) -> impl Iterator<Item = Range<usize>> {
        let seam = match self.held {
            Some(held) if held.positions.order == Order::Zigzag && held.positions.shards > 1 => {
                held.positions.run(0).min(queries)
            }
            _ => queries,
        };
        let after = ranges(queries - seam, ROWS).map(move |r| r.start + seam..r.end + seam);
        ranges(seam, ROWS).chain(after)
    }

    /// The sample and the number within it of the probability that query `i` of a pair's query head
    /// gives to key 0: its random words depend on these.
    #[inline(always)]
    pub fn drawn(&self, (pair, head): (usize, usize), i: usize) -> (usize, usize) {
        let head = pair % self.kv_heads * self.group + head;
        let (sequence, head) = match self.held {
            None => (pair / self.kv_heads, head),
            Some(held) => (held.batch.global(pair / self.kv_heads), held.heads.global(head)),
        };
        let (i, queries) = self.position(i);
        (sequence, (head * queries + i) * self.all_keys())
    }

    /// Place of a pair in a row-major `[batch, positions, heads, dim]` tensor of which it owns
    /// `width` adjacent columns: offset and strides of the matrix of its positions.
    fn place(&self, pair: usize, positions: usize, width: usize) -> (usize, [isize; 2]) {
        let (sequence, head) = (pair / self.kv_heads, pair % self.kv_heads);
        let stride = self.kv_heads * width;
        (sequence * positions * stride + head * width, [stride as isize, 1])
    }

    /// The rows of queries (or outputs) of a pair: one row per position, its heads side by side.
    ///
    /// # Safety
    /// `tensor` must point to `[batch, queries, heads, dim]` elements, of which those of the pair
    /// may be read for `'a`.
    unsafe fn query_rows<'a, T>(&self, tensor: *const T, pair: usize) -> Mat<'a, T> {
        let width = self.group * self.dim;
        let (offset, strides) = self.place(pair, self.queries, width);
        // SAFETY: the pair's rows lie within the tensor; the caller guarantees their use.
        unsafe { Mat::from_raw(tensor.add(offset), [self.queries, width], strides) }
    }

    /// As [`Self::query_rows`], for writing.
    ///
    /// # Safety
    /// As there, and nothing else may use the elements of the pair for `'a`.
    unsafe fn query_rows_mut<'a, T>(&self, tensor: *mut T, pair: usize) -> MatMut<'a, T> {
        let width = self.group * self.dim;
        let (offset, strides) = self.place(pair, self.queries, width);
        // SAFETY: the pair's rows lie within the tensor; the caller guarantees their use.
        unsafe { MatMut::from_raw(tensor.add(offset), [self.queries, width], strides) }
    }

    /// The keys (or values) of a pair, one row per valid position.
    ///
    /// # Safety
    /// `tensor` must point to `[batch, keys, kv_heads, dim]` elements, of which those of the pair
    /// may be read for `'a`.
    unsafe fn key_rows<'a, T>(&self, tensor: *const T, pair: usize) -> Mat<'a, T> {
        let (offset, strides) = self.place(pair, self.keys, self.dim);
        // SAFETY: the pair's rows lie within the tensor; the caller guarantees their use.
        unsafe { Mat::from_raw(tensor.add(offset), [self.valid_keys(), self.dim], strides) }
    }

    /// As [`Self::key_rows`], for writing, and with the padding.
    ///
    /// # Safety
    /// As there, and nothing else may use the elements of the pair for `'a`.
    unsafe fn key_rows_mut<'a, T>(&self, tensor: *mut T, pair: usize) -> MatMut<'a, T> {
        let (offset, strides) = self.place(pair, self.keys, self.dim);
        // SAFETY: the pair's rows lie within the tensor; the caller guarantees their use.
        unsafe { MatMut::from_raw(tensor.add(offset), [self.keys, self.dim], strides) }
    }

    /// The blocks of keys, of at most `size`, that some row of a tile sees; one empty block if no
    /// row sees any, so that every result is written.
    fn key_blocks(&self, rows: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
        // The library packs operands whose size is not a multiple of its vectors.
        let seen = self.visible(rows.end - 1).next_multiple_of(16).min(self.valid_keys());
        let nothing = (seen == 0).then_some(0..0);
        nothing.into_iter().chain(ranges(seen, size.max(1)))
    }
}

fn ranges(total: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total).step_by(size).map(move |start| start..total.min(start + size))
}
