//! Attention by own micro-kernels: keys and values are packed once for a pair, queries and gradients are read
//! where they lie, and probabilities are rounded to the type of the operands before they are multiplied.
//!
//! Tiles of queries are the same as with the library. The backward pass gathers the rounded tiles of some
//! hundred queries before it adds to the gradients of keys and values, whose sums then run over all of them.

mod backward;
mod forward;

use std::ops::Range;

use super::tile::ROWS;
use super::{AttentionKernel, AttentionShape};
use crate::element::{CpuElement, vectorized};
use crate::kernels::gemm::Packing;
use crate::kernels::matrix::{Mat, MatMut};
use crate::products::{
    MicroKernel, PANEL_COLUMNS, Packed, PackedPart, PanelElement, multiply_packed,
    multiply_scratch, pack_whole, packed_words, panel_words,
};

/// An attention whose products are own ones.
#[derive(Clone, Copy, Debug)]
pub struct OwnAttention<'a> {
    /// The attention.
    pub attention: AttentionKernel<'a, Packing>,
    /// What multiplies.
    pub unit: MicroKernel,
}

impl OwnAttention<'_> {
    fn shape(&self) -> &AttentionShape {
        &self.attention.shape
    }

    /// Packs a right operand into the front of `memory`.
    fn pack<'a, E: PanelElement>(&self, right: Mat<E>, memory: &mut &'a mut [u32]) -> Packed<'a> {
        let [inner, columns] = right.shape();
        let own = super::tile::take(memory, packed_words::<E>(inner, columns));
        pack_whole(&self.unit, right, own)
    }

    /// `result = left·right`, or added to it.
    fn product<E: PanelElement>(
        &self,
        left: Mat<E>,
        right: PackedPart<'_>,
        result: MatMut<f32>,
        adds: bool,
        scratch: &mut [u32],
    ) {
        multiply_packed(&self.unit, left, right, result, adds, scratch);
    }

    /// Panels that so many columns take.
    fn panels(&self, columns: usize) -> usize {
        columns.div_ceil(self.unit.columns)
    }

    /// A block of keys in whole panels, whose further columns are zeros.
    fn panel_columns(&self, keys: &Range<usize>) -> usize {
        keys.len().next_multiple_of(PANEL_COLUMNS)
    }

    /// Words of scratch for the left operands and sums of products with such operands: rows, and the inner
    /// dimension with its stride.
    fn room<E: PanelElement>(&self, lefts: &[(usize, [usize; 2])]) -> usize {
        let each =
            |&(rows, inner): &(usize, [usize; 2])| multiply_scratch::<E>(&self.unit, rows, inner);
        lefts.iter().map(each).max().unwrap_or(0)
    }
}

/// Elements of keys that products take as an inner dimension: whole words, and whole steps of a tile.
fn inner_keys<E: PanelElement>(keys: usize) -> usize {
    panel_words(keys.div_ceil(E::PER_WORD)) * E::PER_WORD
}

/// Elements from one row of scores to the next, for so many keys in whole panels.
fn score_stride(columns: usize) -> usize {
    columns + 16
}

/// Words of a tile of scores over so many keys.
fn score_words(keys: usize) -> usize {
    ROWS * score_stride(keys.next_multiple_of(PANEL_COLUMNS))
}

/// Rounds a tile of scores into rows of another matrix, which go on with zeros.
fn narrow<E: CpuElement<Acc = f32>>(from: &MatMut<f32>, to: &mut MatMut<E>) {
    let from = from.as_ref();
    let columns = from.shape()[1];
    vectorized(
        #[inline(always)]
        || {
            for r in 0..from.shape()[0] {
                let (seen, unseen) = to.row(r).split_at_mut(columns);
                for (to, from) in seen.iter_mut().zip(from.row(r)) {
                    *to = E::store(*from);
                }
                unseen.fill(E::default());
            }
        },
    );
}
