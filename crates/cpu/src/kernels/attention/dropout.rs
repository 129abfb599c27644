//! Dropout on probabilities, as a pure function of where a probability stands.

use phalanx_ir::random::philox;

use crate::element::Float;

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

    /// What to multiply the probabilities of query `i` with, from key `first` on: 0 where dropped,
    /// else the reciprocal of the share that is kept.
    #[inline(always)]
    pub(super) fn scale<F: Float>(
        &self,
        (sequence, head): (usize, usize),
        i: usize,
        first: usize,
        row: &mut [F],
    ) {
        let kept = F::from_f64(1.0 / (1.0 - self.probability));
        let threshold = self.threshold();
        let mut j = first;
        let mut row = row;
        while !row.is_empty() {
            let count = (4 - j % 4).min(row.len());
            let words = self.words(sequence, head, i, j / 4);
            let (now, rest) = row.split_at_mut(count);
            for (x, word) in now.iter_mut().zip(&words[j % 4..]) {
                *x = if *word >= threshold {
                    *x * kept
                } else {
                    F::ZERO
                };
            }
            (j, row) = (j + count, rest);
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
