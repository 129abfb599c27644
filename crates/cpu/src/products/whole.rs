//! Products of one thread, which packs the right operand itself: parts of attention, and the matrices of
//! experts.

use std::ops::Range;

use super::blocks::{PANEL_COLUMNS, panel_bytes, panel_words};
use super::micro::MicroKernel;
use super::multiply::{Addition, ProductTarget, multiply};
use super::pack::{PanelElement, pack_right};
use crate::element::CpuElement;
use crate::kernels::matrix::{Mat, MatMut};

/// A right operand in panels.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    memory: &'a [u32],
    /// Words of its inner dimension, zeros included.
    words: usize,
    columns: usize,
}

/// The part of a packed operand that a product takes: from a word of the inner dimension on, some panels.
#[derive(Clone, Debug)]
pub struct PackedPart<'a> {
    /// The whole operand.
    pub of: Packed<'a>,
    /// The first word.
    pub word: usize,
    /// The panels.
    pub panels: Range<usize>,
}

impl<'a> Packed<'a> {
    /// All of it, in the panels of a unit.
    pub fn whole(self, kernel: &MicroKernel) -> PackedPart<'a> {
        PackedPart { of: self, word: 0, panels: 0..self.columns.div_ceil(kernel.columns) }
    }
}

/// Words of a packed operand.
pub fn packed_words<E: PanelElement>(inner: usize, columns: usize) -> usize {
    panel_bytes(inner.div_ceil(E::PER_WORD), columns) / size_of::<u32>()
}

/// Packs a right operand into memory that has [`packed_words`].
///
/// # Panics
/// If it has fewer.
pub fn pack_whole<'a, E: PanelElement>(
    kernel: &MicroKernel,
    right: Mat<E>,
    memory: &'a mut [u32],
) -> Packed<'a> {
    let [inner, columns] = right.shape();
    assert!(memory.len() >= packed_words::<E>(inner, columns), "room for panels");
    let panels = columns.next_multiple_of(PANEL_COLUMNS) / kernel.columns;
    // SAFETY: the memory has room for all panels.
    unsafe { pack_right(kernel, right, memory.as_mut_ptr(), 0..panels) };
    Packed { memory, words: panel_words(inner.div_ceil(E::PER_WORD)), columns }
}

/// `result = left·right`, or added to it.
///
/// # Panics
/// If the part has fewer words than the left operand, or does not lie within the packed operand, or if
/// `scratch` is shorter than [`multiply_scratch`](super::multiply_scratch) says.
pub fn multiply_packed<E: PanelElement, C: CpuElement<Acc = f32>>(
    kernel: &MicroKernel,
    left: Mat<E>,
    right: PackedPart<'_>,
    mut result: MatMut<C>,
    adds: bool,
    scratch: &mut [u32],
) {
    let PackedPart { of: Packed { memory, words, .. }, word, panels } = right;
    let width = kernel.columns;
    assert!(left.shape()[1].div_ceil(E::PER_WORD) + word <= words, "words of panels");
    assert!(panels.end * width * words <= memory.len(), "panels");
    let first = memory[(panels.start * words + word) * width..].as_ptr();
    let (to, shape, strides) = (result.as_mut_ptr(), result.shape(), result.strides());
    let target = |_| ProductTarget {
        panels: first,
        words,
        own: 0..panels.len(),
        // SAFETY: the matrix is borrowed uniquely, and `multiply` uses one target at a time.
        result: unsafe { MatMut::from_raw(to, shape, strides) },
        add: if adds { Addition::Result } else { Addition::Nothing },
    };
    // SAFETY: the panels were packed for this unit, with as many words from this one on.
    unsafe { multiply(kernel, left, 0..left.shape()[0], 1, target, scratch) };
}
