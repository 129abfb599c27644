//! One thread's share of products that share their left operand.
//!
//! Rows come in blocks; a block of the left operand, copied or in place, stays in the second cache while
//! all panels pass by. For each panel the inner dimension advances block by block, and a block of the
//! panel stays in the first cache while all tiles of the rows pass by. Sums between blocks are kept in
//! singles; the last block's tile is rounded and stored while it is in the first cache.

use std::ops::Range;

use super::blocks::{block_rows, inner_blocks, panel_words};
use super::micro::{MicroKernel, TileCall};
use super::pack::{PanelElement, left_stride, pack_left};
use super::store::store;
use crate::element::CpuElement;
use crate::kernels::matrix::{Mat, MatMut};

/// What is added to a product.
#[derive(Clone, Copy, Debug)]
pub enum Addition<'a, C> {
    /// Nothing: the result is overwritten.
    Nothing,
    /// What the result holds.
    Result,
    /// A matrix of the result's shape.
    Other(Mat<'a, C>),
}

/// A result with its right operand.
pub struct ProductTarget<'a, C> {
    /// The first panel of the right operand, as [`pack_right`](super::pack_right) left it.
    pub panels: *const u32,
    /// The panels that this thread multiplies with.
    pub own: Range<usize>,
    /// The whole result, of which this thread writes its rows and the columns of its panels.
    pub result: MatMut<'a, C>,
    /// What is added.
    pub add: Addition<'a, C>,
}

/// Words of scratch that [`multiply`] needs for some rows of a left operand.
pub fn multiply_scratch<E: PanelElement>(kernel: &MicroKernel, rows: usize, inner: usize) -> usize {
    let words = inner.div_ceil(E::PER_WORD);
    let block = block_rows(words).min(rows.next_multiple_of(kernel.rows));
    block.next_multiple_of(32) * left_stride(words) + block.next_multiple_of(32) * kernel.columns
}

/// `result = a·b (+ …)` for rows `rows` of `a` and the panels of each target. `target` is called several
/// times for each of the `count` targets.
///
/// # Safety
/// The panels hold a right operand packed for this kernel, with the inner dimension of `a`, and nobody
/// writes them or uses this thread's part of the results meanwhile.
///
/// # Panics
/// If `scratch` is shorter than [`multiply_scratch`] says, or a result does not have the rows of `a`.
pub unsafe fn multiply<'t, E: PanelElement, C: CpuElement<Acc = f32> + 't>(
    kernel: &MicroKernel,
    a: Mat<E>,
    rows: Range<usize>,
    count: usize,
    target: impl Fn(usize) -> ProductTarget<'t, C>,
    scratch: &mut [u32],
) {
    if rows.is_empty() {
        return;
    }
    assert!(scratch.len() >= multiply_scratch::<E>(kernel, rows.len(), a.shape()[1]));
    let words = a.shape()[1].div_ceil(E::PER_WORD);
    let most = block_rows(words).min(rows.len().next_multiple_of(kernel.rows)).next_multiple_of(32);
    let (copy, sums) = scratch.split_at_mut(most * left_stride(words));
    let sums: &mut [f32] = bytemuck::cast_slice_mut(sums);
    // SAFETY: the caller's: this processor has the kernel's unit.
    unsafe { kernel.enter() };
    for start in rows.clone().step_by(block_rows(words)) {
        let block = start..rows.end.min(start + block_rows(words));
        let left = LeftBlock::new(kernel, a, block.clone(), copy);
        for mut target in (0..count).map(&target) {
            assert_eq!(target.result.shape()[0], a.shape()[0], "rows of a result");
            for panel in target.own.clone() {
                // SAFETY: the caller's: the panel is one of this kernel's.
                unsafe { left.with_panel(kernel, &mut target, panel, &block, sums) };
            }
        }
    }
    // SAFETY: as above.
    unsafe { kernel.leave() };
}

impl MicroKernel {
    unsafe fn enter(&self) {
        if let Some([enter, _]) = self.around {
            // SAFETY: the caller's.
            unsafe { enter() };
        }
    }

    unsafe fn leave(&self) {
        if let Some([_, leave]) = self.around {
            // SAFETY: the caller's.
            unsafe { leave() };
        }
    }
}

/// Rows of the left operand: the first ones in place, the others copied.
struct LeftBlock {
    in_place: *const u8,
    row_bytes: usize,
    /// How many rows are read in place.
    direct: usize,
    copied: *const u8,
    copied_bytes: usize,
    /// Words of a row that tiles take.
    words: usize,
}

impl LeftBlock {
    fn new<E: PanelElement>(
        kernel: &MicroKernel,
        a: Mat<E>,
        rows: Range<usize>,
        copy: &mut [u32],
    ) -> Self {
        let inner = a.shape()[1];
        let words = inner.div_ceil(E::PER_WORD);
        let whole = inner.is_multiple_of(E::PER_WORD * kernel.step);
        let direct = match whole && a.strides()[1] == 1 {
            false => 0,
            true if kernel.takes_whole_tiles() => rows.len() / kernel.rows * kernel.rows,
            true => rows.len(),
        };
        if direct < rows.len() {
            let last = rows.start + direct + (rows.len() - direct).next_multiple_of(kernel.rows);
            let needed = if kernel.takes_whole_tiles() { last } else { rows.end };
            pack_left(a, rows.start + direct..needed, copy);
        }
        let first = a.block(rows, 0..inner);
        Self {
            in_place: first.as_ptr().cast(),
            row_bytes: a.strides()[0] as usize * size_of::<E>(),
            direct,
            copied: copy.as_ptr().cast(),
            copied_bytes: left_stride(words) * size_of::<u32>(),
            words: words.next_multiple_of(kernel.step),
        }
    }

    /// The address of a row from some word on, and the bytes to the next row.
    fn row(&self, i: usize, word: usize) -> (*const u8, usize) {
        let (from, bytes, i) = match i < self.direct {
            true => (self.in_place, self.row_bytes, i),
            false => (self.copied, self.copied_bytes, i - self.direct),
        };
        (from.wrapping_add(i * bytes + word * size_of::<u32>()), bytes)
    }

    /// All tiles of these rows with one panel.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn with_panel<C: CpuElement<Acc = f32>>(
        &self,
        kernel: &MicroKernel,
        target: &mut ProductTarget<'_, C>,
        panel: usize,
        rows: &Range<usize>,
        sums: &mut [f32],
    ) {
        let width = kernel.columns;
        let columns = panel * width..target.result.shape()[1].min((panel + 1) * width);
        let from = panel * width * panel_words(self.words);
        for block in inner_blocks(self.words, kernel.block) {
            let right = target.panels.wrapping_add(from + block.start * width);
            for i in (0..rows.len()).step_by(kernel.rows) {
                let count = kernel.rows.min(rows.len() - i);
                let (left, left_bytes) = self.row(i, block.start);
                // A tile that needs no other block stays in the first cache.
                let at = if self.words <= kernel.block { 0 } else { i * width };
                let tile = &mut sums[at..][..kernel.rows * width];
                let call = TileCall {
                    rows: if kernel.takes_whole_tiles() { kernel.rows } else { count },
                    words: block.len(),
                    left,
                    left_bytes,
                    right,
                    tile: tile.as_mut_ptr(),
                    add: block.start > 0,
                };
                // SAFETY: the rows and words are there, in place or copied; the panel has as many
                // words; the tile is whole; the processor has the unit.
                unsafe { (kernel.run)(&call) };
                if block.end == self.words {
                    let own = rows.start + i..rows.start + i + count;
                    let add = match target.add {
                        Addition::Other(other) => {
                            Addition::Other(other.block(own.clone(), columns.clone()))
                        }
                        same => same,
                    };
                    let to = target.result.reborrow().block(own, columns.clone());
                    store(tile, width, to, add);
                }
            }
        }
    }
}
