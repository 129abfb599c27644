//! Packing: operands become words in the order in which micro-kernels read them.
//!
//! A panel of the right operand holds all words of its columns, word by word: `[inner][columns]`. A
//! copy of the left operand holds rows of words: `[rows][inner]`. Both are made from squares of 16 × 16
//! words, which are transposed where the source runs in the other direction. What lies beyond the
//! operand is zero.

mod square;

use std::ops::Range;

use half::bf16;

use super::blocks::{PANEL_COLUMNS, panel_words};
use super::micro::{MicroKernel, PanelWord};
use crate::element::{CpuElement, vectorized};
use crate::kernels::matrix::Mat;
use square::{SIDE, Square, Transposer};

/// An element type that panels are made of.
pub trait PanelElement: CpuElement<Acc = f32> {
    /// What a word of such elements is.
    const WORD: PanelWord;
    /// Elements in a word.
    const PER_WORD: usize;
    /// The bits of an element.
    fn bits(self) -> u32;
}

impl PanelElement for f32 {
    const WORD: PanelWord = PanelWord::Float;
    const PER_WORD: usize = 1;
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl PanelElement for bf16 {
    const WORD: PanelWord = PanelWord::Pair;
    const PER_WORD: usize = 2;
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
}

/// Packs every column of some panels of `b`, which is `[inner, columns]` with any strides. The panels
/// have [`panel_bytes`](super::panel_bytes) together; one thread's share is a range of them.
///
/// # Safety
/// `to` is the place of the first panel of all, of which the ones in `panels` are written by nobody else.
///
/// # Panics
/// If there are no such panels, or the kernel has other words.
pub unsafe fn pack_right<E: PanelElement>(
    kernel: &MicroKernel,
    b: Mat<E>,
    to: *mut u32,
    panels: Range<usize>,
) {
    assert_eq!(kernel.word, E::WORD);
    let [inner_size, columns] = b.shape();
    let words = panel_words(inner_size.div_ceil(E::PER_WORD));
    let width = kernel.columns;
    assert!(panels.end * width <= columns.next_multiple_of(PANEL_COLUMNS), "{panels:?} of panels");
    let source = Source { mat: b, words: inner_size.div_ceil(E::PER_WORD) };
    let (transposer, adjacent) = (Transposer::here(), b.strides()[1] == 1);
    vectorized(
        #[inline(always)]
        || {
            // Memory is read in the order in which it lies: a few rows for all panels, or columns one by one.
            let (outer, inner) = match adjacent {
                true => (0..words / SIDE, panels.clone()),
                false => (panels.clone(), 0..words / SIDE),
            };
            for outer in outer {
                for inner in inner.clone() {
                    let (panel, p) = if adjacent { (inner, outer) } else { (outer, inner) };
                    let (x, p) = (panel * width, p * SIDE);
                    let to = to.wrapping_add(x * words + p * width);
                    let whole = x + width <= columns && (p + SIDE) * E::PER_WORD <= inner_size;
                    // SAFETY: the caller's: these are the places of 16 words of a panel's columns.
                    unsafe {
                        if whole && adjacent {
                            source.interleave(x, p, width, to);
                            continue;
                        }
                        for column in (0..width).step_by(SIDE) {
                            let to = to.add(column);
                            source.square(x + column, p, true, transposer, to, width);
                        }
                    }
                }
            }
        },
    );
}

/// Words from one row of a copied left operand to the next: never a multiple of a page.
pub(super) fn left_stride(words: usize) -> usize {
    panel_words(words) + SIDE
}

/// Copies rows of `a`, which is `[rows, inner]` with any strides, to rows of [`left_stride`] words; rows
/// that `a` does not have are zero.
///
/// # Panics
/// If `to` is too short.
pub(super) fn pack_left<E: PanelElement>(a: Mat<E>, rows: Range<usize>, to: &mut [u32]) {
    let words = a.shape()[1].div_ceil(E::PER_WORD);
    let stride = left_stride(words);
    let count = rows.len().next_multiple_of(SIDE);
    assert!(to.len() >= count * stride, "{count} rows of {stride} words in {}", to.len());
    let source = Source { mat: a.t(), words };
    let (transposer, to) = (Transposer::here(), to.as_mut_ptr());
    vectorized(
        #[inline(always)]
        || {
            // Two squares side by side read whole cache lines of a source whose rows run across.
            for pair in (0..count).step_by(2 * SIDE) {
                for p in (0..panel_words(words)).step_by(SIDE) {
                    for x in (pair..count.min(pair + 2 * SIDE)).step_by(SIDE) {
                        // SAFETY: `to` has room for `count` rows, and is borrowed uniquely.
                        unsafe {
                            let to = to.add(x * stride + p);
                            source.square(rows.start + x, p, false, transposer, to, stride);
                        }
                    }
                }
            }
        },
    );
}

/// A matrix `[inner, across]` of elements, seen as words.
struct Source<'a, E> {
    mat: Mat<'a, E>,
    words: usize,
}

impl<E: PanelElement> Source<'_, E> {
    /// Packs 16 words of a panel's columns, from column `x` and word `p` on, from a source whose columns are
    /// adjacent.
    ///
    /// # Safety
    /// 16 rows of `width` words from `to` on are written by nobody else.
    #[inline(always)]
    unsafe fn interleave(&self, x: usize, p: usize, width: usize, to: *mut u32) {
        for q in 0..SIDE {
            let row = |half: usize| {
                let row = self.mat.row((p + q) * E::PER_WORD + half);
                &row[x..x + width]
            };
            let (first, second) = (row(0), row(E::PER_WORD - 1));
            // SAFETY: the caller's.
            let words = unsafe { std::slice::from_raw_parts_mut(to.add(q * width), width) };
            for ((word, low), high) in words.iter_mut().zip(first).zip(second) {
                *word = if E::PER_WORD == 1 { low.bits() } else { low.bits() | high.bits() << 16 };
            }
        }
    }

    /// Packs the square from column `x` and word `p` on.
    ///
    /// # Safety
    /// 16 rows from `to` on, `stride` words apart, are written by nobody else.
    #[inline(always)]
    unsafe fn square(
        &self,
        x: usize,
        p: usize,
        by_words: bool,
        transposer: Transposer,
        to: *mut u32,
        stride: usize,
    ) {
        let [inner, across] = self.mat.shape();
        let [down, right] = self.mat.strides();
        let whole = x + SIDE <= across && (p + SIDE) * E::PER_WORD <= inner;
        let mut square = Square::ZERO;
        let by_source = if whole && right == 1 {
            self.words_by_rows(&mut square, x, p);
            true
        } else if whole && down == 1 {
            self.words_by_columns(&mut square, x, p);
            false
        } else {
            self.words_one_by_one(&mut square, x, p, by_words);
            by_words
        };
        // SAFETY: the caller's.
        unsafe {
            match by_source == by_words {
                true => square.store(to, stride),
                false => square.store_transposed(transposer, to, stride),
            }
        }
    }

    /// A whole square from a source whose columns are adjacent: row `q` holds word `p + q`.
    #[inline(always)]
    fn words_by_rows(&self, square: &mut Square, x: usize, p: usize) {
        for (q, line) in square.0.iter_mut().enumerate() {
            let first = self.mat.row((p + q) * E::PER_WORD);
            let first: &[E] = &first[x..x + SIDE];
            if E::PER_WORD == 1 {
                for (word, low) in line.iter_mut().zip(first) {
                    *word = low.bits();
                }
                continue;
            }
            let second = &self.mat.row((p + q) * E::PER_WORD + 1)[x..x + SIDE];
            for ((word, low), high) in line.iter_mut().zip(first).zip(second) {
                *word = low.bits() | high.bits() << 16;
            }
        }
    }

    /// A whole square from a source whose words are adjacent: row `q` holds column `x + q`.
    #[inline(always)]
    fn words_by_columns(&self, square: &mut Square, x: usize, p: usize) {
        let turned = self.mat.t();
        for (q, line) in square.0.iter_mut().enumerate() {
            let row = &turned.row(x + q)[p * E::PER_WORD..(p + SIDE) * E::PER_WORD];
            let bytes: &[u8] = bytemuck::cast_slice(row);
            for (word, bytes) in line.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
    }

    /// Any square; zeros beyond the source.
    #[inline(never)]
    fn words_one_by_one(&self, square: &mut Square, x: usize, p: usize, by_words: bool) {
        let [inner, across] = self.mat.shape();
        for word in p..(p + SIDE).min(self.words) {
            for column in x..(x + SIDE).min(across) {
                let mut bits = 0;
                for half in 0..E::PER_WORD {
                    let at = word * E::PER_WORD + half;
                    if at < inner {
                        bits |= self.mat.at(at, column).bits() << (16 * half);
                    }
                }
                match by_words {
                    true => square.0[word - p][column - x] = bits,
                    false => square.0[column - x][word - p] = bits,
                }
            }
        }
    }
}
