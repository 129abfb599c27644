//! Dropout whose mask is a function of the key and of each element's global index alone.

use phalanx_ir::random::philox;

use super::inlined::inlined;
use crate::element::{Element, Float, vectorized};

/// What the random numbers of one dropout depend on, besides the element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// Philox's key.
    pub key: [u32; 2],
    /// The upper half of Philox's counter: which op this is, in which step.
    pub purpose: [u32; 2],
}

/// `out = x / (1 − p)` where an element is kept, which it is with probability `1 − p`, else zero.
///
/// `first` is the global index of the first element. Element `i` is kept iff word `i % 4` of
/// Philox's block `i / 4` is at least `p · 2³²`. The same call on `dy` gives the gradient.
pub fn dropout<T: Element>(x: &[T], p: f64, key: DropoutKey, first: u64, out: &mut [T]) {
    assert_eq!(x.len(), out.len());
    let threshold = (p * 2f64.powi(32)) as u64;
    let Ok(threshold) = u32::try_from(threshold) else {
        out.fill(T::default());
        return;
    };
    let factor = T::Acc::from_f64(1.0 / (1.0 - p));
    // Up to where the first block of Philox begins.
    let head = (first.wrapping_neg() % 4).min(out.len() as u64) as usize;
    let (x_head, x) = x.split_at(head);
    let (out_head, out) = out.split_at_mut(head);
    let words = key.words(first / 4);
    let word_of = |i: usize| words[(first % 4) as usize + i];
    for (i, (out, x)) in out_head.iter_mut().zip(x_head).enumerate() {
        *out = keep(*x, word_of(i), threshold, factor);
    }
    let blocks = first.div_ceil(4)..;
    vectorized(inlined!(|| {
        let chunks = x.chunks(4 * BLOCKS).zip(out.chunks_mut(4 * BLOCKS));
        for (block, (x, out)) in blocks.step_by(BLOCKS).zip(chunks) {
            keep_some(x, key, block, threshold, factor, out);
        }
    }));
}

/// Blocks of random words that are made at a time: enough to fill the vector registers.
const BLOCKS: usize = 64;

impl DropoutKey {
    #[inline(always)]
    fn words(&self, block: u64) -> [u32; 4] {
        let [low, high] = self.purpose;
        philox(self.key, [block as u32, (block >> 32) as u32, low, high])
    }
}

/// At most `4 · BLOCKS` elements, of which the first takes the first word of `block`.
#[inline(always)]
fn keep_some<T: Element>(
    x: &[T],
    key: DropoutKey,
    block: u64,
    threshold: u32,
    factor: T::Acc,
    out: &mut [T],
) {
    let mut words = [0; 4 * BLOCKS];
    for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *four = key.words(block + i as u64);
    }
    for ((out, x), word) in out.iter_mut().zip(x).zip(&words) {
        *out = keep(*x, *word, threshold, factor);
    }
}

#[inline(always)]
fn keep<T: Element>(x: T, word: u32, threshold: u32, factor: T::Acc) -> T {
    let scaled = T::store(x.load() * factor);
    if word >= threshold {
        scaled
    } else {
        T::default()
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{doubles, normals};
    use super::*;

    const KEY: DropoutKey = DropoutKey {
        key: [11, 12],
        purpose: [13, 14],
    };

    #[test]
    fn dropout_follows_the_global_index() {
        let x: Vec<f32> = normals("x", 1000);
        // Near 2³⁴ the block's number outgrows one word of the counter.
        for first in [0, 1, 2, 3, 4, 17, (1 << 34) - 500] {
            let mut out = vec![9.0; x.len()];
            dropout(&x, 0.3, KEY, first, &mut out);
            for (i, (out, x)) in (first..).zip(out.iter().zip(&x)) {
                let counter = [(i / 4) as u32, ((i / 4) >> 32) as u32, 13, 14];
                let word = philox([11, 12], counter)[(i % 4) as usize];
                let kept = f64::from(word) >= 0.3 * 2f64.powi(32);
                assert_eq!(
                    *out,
                    if kept { x * (1.0 / 0.7) } else { 0.0 },
                    "element {i}"
                );
            }
            let mut piece = vec![9.0; 2];
            dropout(&x[501..503], 0.3, KEY, first + 501, &mut piece);
            assert_eq!(piece, out[501..503]);
        }
    }

    #[test]
    fn dropout_keeps_its_share_and_the_mean() {
        let x = vec![bf16::ONE; 100_000];
        let mut out = x.clone();
        for p in [0.1, 0.5] {
            dropout(&x, p, KEY, 0, &mut out);
            let kept = out.iter().filter(|v| **v != bf16::ZERO).count() as f64 / 1e5;
            assert!((kept - (1.0 - p)).abs() < 0.006, "kept {kept} at {p}");
            let mean = doubles(&out).iter().sum::<f64>() / 1e5;
            assert!((mean - 1.0).abs() < 0.01, "mean {mean} at {p}");
        }
        dropout(&x, 0.0, KEY, 0, &mut out);
        assert_eq!(out, x);
        dropout(&x, 1.0, KEY, 0, &mut out);
        assert!(out.iter().all(|v| *v == bf16::ZERO));
    }
}
