//! The only code that touches data: strided copies and reductions, and the count of foreign bytes.
//!
//! All data movement of a transport ends here, row by row, and bytes are counted with the rows: so
//! every byte read from another rank's memory is counted.

mod number;
mod reduce;
mod stream;

pub(crate) use reduce::{Combine, Pointers, is_reducible, reduce};

use crate::blocks::Strides;
use crate::device::StridedRows;

/// Where a block begins, and how far apart its rows are.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Its first byte.
    pub(crate) base: *mut u8,
    /// Bytes from one `outer` index to the next.
    pub(crate) outer: usize,
    /// Bytes from one row to the next.
    pub(crate) row: usize,
    /// Whether the memory is another rank's.
    pub(crate) foreign: bool,
}

impl Place {
    /// Where block `block` of a buffer of this rank lies, whose strides count elements of `size`.
    pub(crate) fn of(base: *mut u8, strides: Strides, block: usize, size: usize) -> Self {
        Self {
            base: base.wrapping_add(block * strides.block * size),
            outer: strides.outer * size,
            row: strides.row * size,
            foreign: false,
        }
    }

    /// The first byte of a row.
    #[inline(always)]
    pub(crate) fn at(&self, outer: usize, row: usize) -> *mut u8 {
        // Wrapping, because a place of an empty block may be a null pointer.
        self.base.wrapping_add(outer * self.outer + row * self.row)
    }

    /// Whether the rows of a block follow each other directly.
    /// The same for a device.
    pub(crate) fn rows(&self) -> StridedRows {
        StridedRows { base: self.base, outer: self.outer, row: self.row }
    }

    pub(crate) fn is_dense(&self, shape: [usize; 3]) -> bool {
        let [outer, rows, len] = shape;
        (rows <= 1 || self.row == len) && (outer <= 1 || self.outer == rows * len)
    }
}

/// The bytes of other ranks' memory that were touched.
#[derive(Default)]
pub(crate) struct Meter {
    /// How many.
    pub(crate) bytes: u64,
}

/// Copies a block of `shape` (`outer`, `rows`, bytes per row); nothing if it is in place already.
///
/// # Safety
/// All rows of `from` are readable, those of `to` writable, for this thread alone; they do not
/// overlap unless the places are equal.
pub(crate) unsafe fn copy(shape: [usize; 3], from: Place, to: Place, meter: &mut Meter) {
    let Some([outer, rows, len]) = to_copy(shape, from, to) else { return };
    for o in 0..outer {
        for r in 0..rows {
            // SAFETY: the caller guarantees every row of both places.
            unsafe { std::ptr::copy_nonoverlapping(from.at(o, r), to.at(o, r), len) };
            meter.bytes += if from.foreign || to.foreign { len as u64 } else { 0 };
        }
    }
}

/// The shape of what a copy has to move, in as few rows as possible; nothing if there is nothing, or if it is
/// in place already.
pub(crate) fn to_copy(shape: [usize; 3], from: Place, to: Place) -> Option<[usize; 3]> {
    let dense = from.is_dense(shape) && to.is_dense(shape);
    let [outer, rows, len] = if dense { [1, 1, shape[0] * shape[1] * shape[2]] } else { shape };
    // Strides of dims with one element do not matter.
    let alike = (outer <= 1 || from.outer == to.outer) && (rows <= 1 || from.row == to.row);
    let moves = outer * rows * len > 0 && !(from.base == to.base && alike);
    moves.then_some([outer, rows, len])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in a gather of blocks that are already in place: the strides of single rows differ.
    #[test]
    fn what_is_in_place_already_is_left_alone() {
        let mut bytes = [1u8, 2, 3, 4];
        let base = bytes.as_mut_ptr();
        let place = |row| Place { base, outer: row, row, foreign: true };
        let (from, to, mut meter) = (place(4), place(64), Meter::default());
        // SAFETY: both places are the four bytes.
        unsafe { copy([1, 1, 4], from, to, &mut meter) };
        assert_eq!((bytes, meter.bytes), ([1, 2, 3, 4], 0));
    }
}
