//! One thread's share of products that share their left operand.
//!
//! Rows come in blocks; a block of the left operand, copied or in place, stays in the second cache while
//! all panels pass by. For each panel the inner dimension advances block by block, and a block of the
//! panel stays in the first cache while all tiles of the rows pass by. Sums between blocks are kept in
//! singles; the last block's tile is rounded and stored while it is in the first cache.

use std::ops::Range;

use phalanx_ir::DType;

use super::blocks::{SHORT, block_rows, inner_blocks};
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
    /// Words of the inner dimension in these panels ([`panel_words`](super::panel_words)); a left operand may have fewer.
    pub words: usize,
    /// The panels that this thread multiplies with.
    pub own: Range<usize>,
    /// The whole result, of which this thread writes its rows and the columns of its panels.
    pub result: MatMut<'a, C>,
    /// What is added.
    pub add: Addition<'a, C>,
}

/// Words of scratch that [`multiply`] needs for some rows of a left operand, whose inner dimension has a
/// size and a stride.
pub fn multiply_scratch<E: PanelElement>(
    kernel: &MicroKernel,
    rows: usize,
    inner: [usize; 2],
) -> usize {
    let words = inner[0].div_ceil(E::PER_WORD);
    let copied = match reads_in_place::<E>(kernel, inner[0], inner[1] as isize) {
        // Tiles take whole rows only, and the last ones may not be there.
        true if kernel.takes_whole_tiles() => kernel.rows.next_multiple_of(COPIED_ROWS),
        true => 0,
        false => sum_rows(kernel, rows, words),
    };
    copied * left_stride(words) + sum_rows(kernel, rows, words) * kernel.columns
}

/// The same for any operand that is not larger in either direction.
pub fn multiply_scratch_up_to<E: PanelElement>(
    kernel: &MicroKernel,
    rows: usize,
    [inner, stride]: [usize; 2],
) -> usize {
    // A longer inner dimension may need less, because its blocks have fewer rows.
    let lengths = [inner, inner.min(SHORT * E::PER_WORD)];
    let each = lengths.map(|inner| multiply_scratch::<E>(kernel, rows, [inner, stride]));
    each[0].max(each[1])
}

/// Rows whose sums have room, and that are copied at once.
fn sum_rows(kernel: &MicroKernel, rows: usize, words: usize) -> usize {
    block_rows(words).min(rows.next_multiple_of(kernel.rows)).next_multiple_of(COPIED_ROWS)
}

/// Copies have a multiple of this many rows.
const COPIED_ROWS: usize = 32;

/// Whether whole tiles of a left operand need no copy.
fn reads_in_place<E: PanelElement>(kernel: &MicroKernel, inner: usize, stride: isize) -> bool {
    stride == 1 && inner.is_multiple_of(E::PER_WORD * kernel.step)
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
    let inner = [a.shape()[1], a.strides()[1] as usize];
    assert!(scratch.len() >= multiply_scratch::<E>(kernel, rows.len(), inner));
    let words = a.shape()[1].div_ceil(E::PER_WORD);
    let most = sum_rows(kernel, rows.len(), words);
    let (sums, copy) = scratch.split_at_mut(most * kernel.columns);
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
        let direct = match reads_in_place::<E>(kernel, inner, a.strides()[1]) {
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
        debug_assert!(target.words >= self.words, "words of panels");
        let from = panel * width * target.words;
        for block in inner_blocks(self.words, kernel.block) {
            let right = target.panels.wrapping_add(from + block.start * width);
            for i in (0..rows.len()).step_by(kernel.rows) {
                let count = kernel.rows.min(rows.len() - i);
                let own = rows.start + i..rows.start + i + count;
                let (left, left_bytes) = self.row(i, block.start);
                // A tile that needs no other block stays in the first cache.
                let at = if self.words <= kernel.block { 0 } else { i * width };
                let tile = &mut sums[at..][..kernel.rows * width];
                let single = self.words <= kernel.block;
                let place = target.in_place(kernel, (&own, &columns), single);
                let (to, tile_stride, adds) = place.unwrap_or((tile.as_mut_ptr(), width, false));
                let call = TileCall {
                    rows: if kernel.takes_whole_tiles() { kernel.rows } else { count },
                    words: block.len(),
                    left,
                    left_bytes,
                    right,
                    tile: to,
                    tile_stride,
                    add: block.start > 0 || adds,
                };
                // SAFETY: the rows and words are there, in place or copied; the panel has as many
                // words; the tile is whole; the processor has the unit.
                unsafe { (kernel.run)(&call) };
                if block.end == self.words && place.is_none() {
                    target.store(tile, width, (own, columns.clone()));
                }
            }
        }
    }
}

impl<C: CpuElement<Acc = f32>> ProductTarget<'_, C> {
    /// Where a micro-kernel may sum up in the result itself: the address, the elements to the next row, and
    /// whether it adds to what is there. The bits are those of a tile that is stored afterwards.
    fn in_place(
        &mut self,
        kernel: &MicroKernel,
        (rows, columns): (&Range<usize>, &Range<usize>),
        single: bool,
    ) -> Option<(*mut f32, usize, bool)> {
        let whole = columns.len() == kernel.columns
            && (rows.len() == kernel.rows || !kernel.takes_whole_tiles());
        let [down, right] = self.result.strides();
        if C::DTYPE != DType::F32 || right != 1 || !whole {
            return None;
        }
        let adds = match self.add {
            Addition::Nothing => false,
            // Blocks are summed up before they are added, and tiles would start from what is there.
            Addition::Result if single && !kernel.takes_whole_tiles() => true,
            Addition::Result | Addition::Other(_) => return None,
        };
        let mut to = self.result.reborrow().block(rows.clone(), columns.clone());
        Some((to.as_mut_ptr().cast(), down as usize, adds))
    }

    /// Rounds a tile and stores it, or adds it.
    fn store(
        &mut self,
        tile: &[f32],
        stride: usize,
        (rows, columns): (Range<usize>, Range<usize>),
    ) {
        let add = match self.add {
            Addition::Other(other) => Addition::Other(other.block(rows.clone(), columns.clone())),
            same => same,
        };
        store(tile, stride, self.result.reborrow().block(rows, columns), add);
    }
}
