//! Which piece of the corpus is the n-th sample: a pure function, no state, no memory.
//!
//! A corpus of L tokens is divided into n = ⌊(L − 1) / T⌋ pieces. Piece i has the inputs
//! `i·T .. i·T + T` and, shifted by one, the targets `i·T + 1 .. i·T + T + 1`: every token but the
//! first is a target exactly once per epoch. The last pieces are held out for evaluation and never
//! trained on. Each epoch takes the training pieces in another pseudo-random order, a keyed
//! bijection of `0..n` that is computed, not stored.

use phalanx_ir::random::{Stream, philox};

use crate::{Corpus, DataError};

/// The default share of the samples that is held out for evaluation.
pub const DEFAULT_VAL_FRACTION: f64 = 0.05;

/// The two disjoint parts of a corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// All but the held-out samples, in a new order each epoch.
    #[default]
    Train,
    /// The held-out samples, in the order of the corpus.
    Validation,
}

/// Says which piece of the corpus is which sample.
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    seed: u64,
    seq_len: usize,
    train: u64,
    validation: u64,
}

impl Sampler {
    /// Divides `corpus` into samples of `seq_len` inputs and holds `val_fraction` of them out: none
    /// for 0, else at least one.
    pub fn new(
        corpus: &dyn Corpus,
        seed: u64,
        seq_len: usize,
        val_fraction: f64,
    ) -> Result<Self, DataError> {
        if seq_len == 0 {
            return Err(setting("seq_len", seq_len, "a sample needs at least one token"));
        }
        if !(0.0..1.0).contains(&val_fraction) {
            let remedy = "use a share of at least 0 and below 1";
            return Err(setting("val_fraction", val_fraction, remedy));
        }
        let tokens = corpus.len_tokens();
        let pieces = tokens.saturating_sub(1) / seq_len as u64;
        let least = if val_fraction > 0.0 { 2 } else { 1 };
        if pieces < least {
            return Err(DataError::TooShort {
                corpus: corpus.describe(),
                tokens,
                seq_len,
                needed: least * seq_len as u64 + 1,
                longest: tokens.saturating_sub(1) / least,
            });
        }
        let validation = match val_fraction > 0.0 {
            true => ((pieces as f64 * val_fraction).round() as u64).clamp(1, pieces - 1),
            false => 0,
        };
        Ok(Self { seed, seq_len, train: pieces - validation, validation })
    }

    /// How many samples one pass over `split` has.
    pub fn samples(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.train,
            Split::Validation => self.validation,
        }
    }

    /// The epoch of a global training sample index, and the index within that epoch.
    pub fn epoch(&self, global: u64) -> (u64, u64) {
        (global / self.train, global % self.train)
    }

    /// The corpus position of the first token of training sample `index` of `epoch`.
    pub fn train_start(&self, epoch: u64, index: u64) -> u64 {
        let order = Permutation::new(self.seed, epoch, self.train);
        order.at(index % self.train) * self.seq_len as u64
    }

    /// The corpus position of the first token of held-out sample `index`.
    pub fn validation_start(&self, index: u64) -> u64 {
        (self.train + index % self.validation.max(1)) * self.seq_len as u64
    }
}

/// A pseudo-random order of `0..n`, keyed by seed and epoch.
///
/// A Feistel network permutes the numbers of 2w bits for the smallest w with 2²ʷ ≥ n, for any round
/// function; here it is Philox. A number that lands outside `0..n` is sent through again until it
/// lands inside ("cycle walking"), which is a bijection of `0..n` because the network is one of the
/// larger range; as 2²ʷ < 4n (or n is tiny), that takes fewer than four rounds on average.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    key: [u32; 2],
    epoch: u64,
    n: u64,
    half_bits: u32,
}

impl Permutation {
    const ROUNDS: u32 = 6;

    /// The order of `epoch` for `n` samples.
    pub fn new(seed: u64, epoch: u64, n: u64) -> Self {
        let [a, b, ..] = Stream::named(seed, "sample order").words(0);
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Self { key: [a, b], epoch, n, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The number at place `index`, which must be below n.
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.n, "place {index} of {}", self.n);
        let mut number = self.network(index);
        while number >= self.n {
            number = self.network(number);
        }
        number
    }

    fn network(&self, number: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for round in 0..Self::ROUNDS {
            let counter = [right as u32, round, self.epoch as u32, (self.epoch >> 32) as u32];
            let [word, ..] = philox(self.key, counter);
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        left << self.half_bits | right
    }
}

/// The error for a setting that cannot work.
pub(crate) fn setting(
    setting: &'static str,
    found: impl std::fmt::Display,
    remedy: impl Into<String>,
) -> DataError {
    DataError::Setting { setting, found: found.to_string(), remedy: remedy.into() }
}
