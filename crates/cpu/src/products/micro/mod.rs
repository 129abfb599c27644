//! Micro-kernels: one tile of a result, summed over a block of the inner dimension.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod model;

use super::units::{CpuUnit, UnitSet};

/// What a word of a panel holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PanelWord {
    /// A single.
    Float,
    /// Two `bf16` that are neighbours in the inner dimension, the first in the low half.
    Pair,
}

/// Computes a tile of a result.
#[derive(Clone, Copy, Debug)]
pub struct MicroKernel {
    /// The unit that computes.
    pub unit: CpuUnit,
    /// What the words of both operands are.
    pub word: PanelWord,
    /// Rows of a tile.
    pub rows: usize,
    /// Columns of a tile, and of a panel.
    pub columns: usize,
    /// Words of the inner dimension in a block. It is fixed, because the bits of a sum depend on it.
    pub block: usize,
    /// Words of the inner dimension that it takes at once, and whether it takes all rows of a tile: the
    /// left operand is copied where these are not there.
    pub(super) step: usize,
    pub(super) run: unsafe fn(&TileCall),
    /// What a thread does before the first tile, and after the last.
    pub(super) around: Option<[unsafe fn(); 2]>,
}

/// One call of a micro-kernel.
///
/// Word `p` of row `i` of the left operand lies at `left + i·left_bytes + 4p`, word `p` of column `j` of
/// the right one at `right[p·columns + j]`, and the sum at `tile[i·tile_stride + j]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileCall {
    pub(super) rows: usize,
    pub(super) words: usize,
    pub(super) left: *const u8,
    pub(super) left_bytes: usize,
    pub(super) right: *const u32,
    pub(super) tile: *mut f32,
    pub(super) tile_stride: usize,
    /// Whether the sum is added to what the tile holds.
    pub(super) add: bool,
}

impl TileCall {
    /// The address of a row of the left operand.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub(super) unsafe fn row(&self, i: usize) -> *const u8 {
        // SAFETY: the caller's.
        unsafe { self.left.add(i * self.left_bytes) }
    }
}

impl MicroKernel {
    /// The fastest one for these words among some units, of which the processor must have all.
    pub fn best(units: UnitSet, word: PanelWord) -> Option<Self> {
        debug_assert_eq!(units.and(UnitSet::here()), units, "the processor has these units");
        units.iter().filter_map(|unit| Self::of(unit, word)).last()
    }

    /// That of a unit, if it computes with such words.
    #[cfg(target_arch = "x86_64")]
    fn of(unit: CpuUnit, word: PanelWord) -> Option<Self> {
        match (unit, word) {
            (CpuUnit::Avx2, PanelWord::Float) => Some(avx2::FLOATS),
            (CpuUnit::Avx2, PanelWord::Pair) => Some(avx2::PAIRS),
            (CpuUnit::Avx512, PanelWord::Float) => Some(avx512::FLOATS),
            (CpuUnit::Avx512, PanelWord::Pair) => Some(avx512::PAIRS),
            (CpuUnit::Avx512Bf16, PanelWord::Pair) => Some(avx512::DOTS),
            (CpuUnit::Amx, PanelWord::Pair) => Some(amx::TILES),
            (CpuUnit::Avx512Bf16 | CpuUnit::Amx, PanelWord::Float) => None,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: CpuUnit, _: PanelWord) -> Option<Self> {
        None
    }

    /// The same without the unit, in plain code that gives the same bits: for tests on processors that
    /// lack it.
    #[cfg(test)]
    pub(super) fn emulated(unit: CpuUnit, word: PanelWord) -> Option<Self> {
        model::of(unit, word)
    }

    /// Whether every tile must have all its rows, and the inner dimension whole steps.
    pub(super) fn takes_whole_tiles(&self) -> bool {
        self.step > 1
    }

    /// Done by a thread before its first tile.
    ///
    /// # Safety
    /// The processor has the unit.
    pub(super) unsafe fn enter(&self) {
        if let Some([enter, _]) = self.around {
            // SAFETY: the caller's.
            unsafe { enter() };
        }
    }

    /// Done by a thread after its last tile.
    ///
    /// # Safety
    /// As above.
    pub(super) unsafe fn leave(&self) {
        if let Some([_, leave]) = self.around {
            // SAFETY: the caller's.
            unsafe { leave() };
        }
    }
}
