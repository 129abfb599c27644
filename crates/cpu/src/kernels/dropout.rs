//! Dropout, by the mask that `phalanx_ir::random` defines: a function of the key and of each
//! element's global place alone.

use std::ops::Range;

use phalanx_ir::random::{keep_threshold, mask_words};

use super::inlined::inlined;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// Which elements one dropout drops.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// The key operand: seed low, seed high, step, segment instance, first sample.
    pub key: [i32; 5],
    /// Distinguishes the random ops of one segment.
    pub site: u32,
    /// The probability of an element to be dropped.
    pub p: f64,
}

/// `out = x / (1 − p)` where an element is kept, else zero. The same call on `dy` gives the
/// gradient.
///
/// `sample` is the number of elements of one sample, and `first` the row-major index, over the
/// whole value, of the first element given: a share may begin and end inside samples.
pub fn dropout<T: CpuElement>(x: &[T], mask: Mask, sample: usize, first: usize, out: &mut [T]) {
    assert_eq!(x.len(), out.len());
    let mut done = 0;
    while done < x.len() {
        let (row, element) = ((first + done) / sample, (first + done) % sample);
        let end = x.len().min(done + sample - element);
        dropout_of_sample(&x[done..end], mask, row, element, &mut out[done..end]);
        done = end;
    }
}

/// As [`dropout`], for neighbouring elements of sample `row`, of which the first is number
/// `element`.
pub fn dropout_of_sample<T: CpuElement>(
    x: &[T],
    mask: Mask,
    row: usize,
    element: usize,
    out: &mut [T],
) {
    assert_eq!(x.len(), out.len());
    let Some(dropped) = mask.last_dropped() else {
        return out.copy_from_slice(x);
    };
    let factor = mask.factor();
    vectorized(inlined!(|| {
        mask.draw(
            row,
            element,
            x.len(),
            #[inline(always)]
            |range, words| {
                let x = &x[range.clone()];
                keep_some(x, words, dropped, factor, &mut out[range]);
            },
        );
    }));
}

impl Mask {
    /// The largest word whose element is dropped; none if every element is kept.
    pub(super) fn last_dropped(self) -> Option<u32> {
        let below = keep_threshold(self.p).checked_sub(1)?;
        Some(u32::try_from(below).unwrap_or(u32::MAX))
    }

    /// What elements that are kept are multiplied with.
    pub(super) fn factor<F: CpuFloat>(self) -> F {
        F::from_f64(1.0 / (1.0 - self.p))
    }

    /// Draws the words of `len` elements of sample `row`, of which the first is number `element`:
    /// calls `each` with one range of them after another, and their words.
    #[inline(always)]
    pub(super) fn draw(
        self,
        row: usize,
        element: usize,
        len: usize,
        mut each: impl FnMut(Range<usize>, &[u32]),
    ) {
        let end = element + len;
        let mut next = element;
        while next < end {
            let quad = next / 4;
            let mut words = [0; 4 * QUADS];
            // A whole buffer whatever the need: a loop of known length has no slow remainder.
            for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *four = mask_words(self.key, self.site, row as u64, (quad + i) as u64);
            }
            let stop = end.min(4 * (quad + QUADS));
            let range = next - element..stop - element;
            each(range, &words[next % 4..][..stop - next]);
            next = stop;
        }
    }
}

/// Fours of random words that are made at a time: enough to fill the vector registers.
const QUADS: usize = 16;

#[inline(always)]
fn keep_some<T: CpuElement>(x: &[T], words: &[u32], dropped: u32, factor: T::Acc, out: &mut [T]) {
    for ((out, x), word) in out.iter_mut().zip(x).zip(words) {
        let scaled = T::store(x.load() * factor);
        *out = if *word > dropped { scaled } else { T::default() };
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use phalanx_ir::random::keeps;

    use super::super::testing::{doubles, normals};
    use super::*;

    const MASK: Mask = Mask { key: [11, -12, 13, 14, 15], site: 16, p: 0.3 };

    #[track_caller]
    fn follows_the_definition(x: &[f32], mask: Mask, sample: usize, first: usize) {
        let mut out = vec![9.0; x.len()];
        dropout(x, mask, sample, first, &mut out);
        for (i, (out, x)) in (first..).zip(out.iter().zip(x)) {
            let (row, element) = ((i / sample) as u64, (i % sample) as u64);
            let kept = keeps(mask.key, mask.site, row, element, mask.p);
            let factor = (1.0 / (1.0 - mask.p)) as f32;
            let want = if kept { x * factor } else { 0.0 };
            assert_eq!(*out, want, "element {i} in samples of {sample}");
        }
    }

    #[test]
    fn every_element_follows_the_definition() {
        let x: Vec<f32> = normals("x", 1000);
        for sample in [1, 2, 3, 5, 7, 63, 64, 65, 257, 999, 1000, 5000] {
            for first in [0, 1, 2, 3, 4, 17, 998, 4999] {
                follows_the_definition(&x, MASK, sample, first);
            }
        }
        follows_the_definition(&x[..0], MASK, 7, 3);
    }

    /// Above 2³⁴ elements the counter of groups of four needs more than one word.
    #[test]
    fn samples_may_be_huge() {
        let x: Vec<f32> = normals("x", 1000);
        let sample = (1 << 34) + 4321;
        for first in [(1 << 34) - 501, sample - 502, 3 * sample + (1 << 34) - 3] {
            follows_the_definition(&x, MASK, sample, first);
        }
    }

    #[test]
    fn any_probability_follows_the_definition() {
        let x: Vec<f32> = normals("x", 1000);
        for p in [0.0, 1e-12, 0.001, 0.5, 0.999, 1.0 - 1e-12, 1.0] {
            follows_the_definition(&x, Mask { p, ..MASK }, 77, 5);
        }
    }

    /// An infinity or NaN that is dropped becomes zero.
    #[test]
    fn what_is_dropped_is_zero() {
        let mut out = [9.0; 100];
        for x in [f32::INFINITY, f32::NAN] {
            dropout(&[x; 100], MASK, 100, 0, &mut out);
            let zeros = out.iter().filter(|x| **x == 0.0).count();
            assert!((10..60).contains(&zeros), "{zeros} zeros");
        }
    }

    #[test]
    fn dropout_keeps_its_share_and_the_mean() {
        let x = vec![bf16::ONE; 100_000];
        let mut out = x.clone();
        for p in [0.1, 0.5] {
            dropout(&x, Mask { p, ..MASK }, 333, 0, &mut out);
            let kept = out.iter().filter(|v| **v != bf16::ZERO).count() as f64 / 1e5;
            assert!((kept - (1.0 - p)).abs() < 0.006, "kept {kept} at {p}");
            let mean = doubles(&out).iter().sum::<f64>() / 1e5;
            assert!((mean - 1.0).abs() < 0.01, "mean {mean} at {p}");
        }
    }
}
