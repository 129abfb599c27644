//! Dropout on probabilities, as a pure function of where a probability stands.

use phalanx_ir::random::philox;

use crate::element::Float;

/// Counters that are turned into random words at once.
const LANES: usize = 16;

/// Which probabilities are dropped.
///
/// The decision for one probability depends on the key and its global place alone, so every layout
/// and every number of threads drops the same ones, and the backward pass finds them again.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Share of the probabilities that is dropped; at least 0 and below 1.
    pub probability: f64,
    /// Seed of the step and the layer.
    pub key: [u32; 2],
    /// Global index of the first sequence here.
    pub first_sequence: u32,
    /// Global index of the first query head here.
    pub first_head: u32,
}

impl Dropout {
    /// Whether the probability that query `i` of a sequence and head (local indices) gives to key
    /// `j` is kept.
    pub fn keep(&self, sequence: usize, head: usize, i: usize, j: usize) -> bool {
        self.words(sequence, head, i, j / 4)[j % 4] >= self.threshold()
    }

    /// Multiplies a row, which belongs to query `i` and the keys from `first` (a multiple of four)
    /// on: by 0 where the probability is dropped, else by the reciprocal of the share that is kept.
    #[inline(always)]
    pub(super) fn scale<F: Float>(
        &self,
        (sequence, head): (usize, usize),
        i: usize,
        first: usize,
        row: &mut [F],
    ) {
        assert_eq!(first % 4, 0);
        let kept = F::from_f64(1.0 / (1.0 - self.probability));
        let threshold = self.threshold();
        for (n, part) in row.chunks_mut(4 * LANES).enumerate() {
            let four = first / 4 + n * LANES;
            let mut words = [[0; 4]; LANES];
            for (lane, words) in words.iter_mut().enumerate() {
                *words = self.words(sequence, head, i, four + lane);
            }
            for (x, word) in part.iter_mut().zip(words.as_flattened()) {
                *x = if *word >= threshold {
                    *x * kept
                } else {
                    F::ZERO
                };
            }
        }
    }

    #[inline(always)]
    fn words(&self, sequence: usize, head: usize, i: usize, four: usize) -> [u32; 4] {
        let sequence = self.first_sequence + sequence as u32;
        let head = self.first_head + head as u32;
        philox(self.key, [four as u32, i as u32, head, sequence])
    }

    /// A word below this drops its probability.
    #[inline(always)]
    fn threshold(&self) -> u32 {
        (self.probability * f64::from(u32::MAX)) as u32
    }
}
