//! A synthetic language whose best possible loss is known exactly.
//!
//! **The source.** Of a vocabulary of V, the first A = 2⌊V/2⌋ tokens are used and divided at random
//! into two halves of h = A/2 tokens. Each token has two random labels in `0..h`, each label on two
//! tokens. The next token follows with probability ½ from the previous token and with probability ½
//! from the one before it:
//!
//! | probability | next token                                                     |
//! |-------------|----------------------------------------------------------------|
//! | 13/32       | first half, at place label₁(previous)                          |
//! | 3/32        | first half, at place label₁(previous) + ⌊h/2⌋ (mod h)          |
//! | 13/32       | second half, at place label₂(the one before)                   |
//! | 3/32        | second half, at place label₂(the one before) + ⌊h/2⌋ (mod h)   |
//!
//! **Its entropy rate is exact.** Whatever the two previous tokens are, the four candidates
//! differ: two lie in one half, two in the other, and within a half their places differ by ⌊h/2⌋,
//! which is not 0 mod h for h ≥ 2. So the entropy of the next token given all before it is
//! H = −2·(13/32 ln 13/32 + 3/32 ln 3/32) ≈ 1.1757 nats in every context, and no stationary
//! distribution is needed. (Five random bits decide, so the probabilities are exact too.) H is below 0.55 ln V from V = 9 on; 10 is the smallest allowed.
//!
//! **Unigram statistics are useless.** If both previous tokens are uniform over the A used ones
//! (however they depend on each other), then a label is uniform over `0..h`, hence so is each
//! place, and a token of either half has probability ½ · 1/h = 1/A. The first two tokens are drawn
//! uniformly, so every token is exactly uniform: unigram entropy ln A.
//!
//! **The previous token alone is not enough**: half the time the next token depends on the one
//! before it, about which the previous token says nothing. And it is learned quickly, because the
//! effect of each of the two tokens can be learned separately.
//!
//! **Reading anywhere.** A chain is sequential, so the corpus consists of blocks of 2048 tokens
//! that start afresh with two uniform tokens; a read begins at its block's start. A restart costs
//! entropy, which the floor includes: (2 ln A + 2046 H) / 2048 nats per token. A model that sees
//! windows of T tokens has less context at a window's first target and stays a little above, by
//! at most (ln A − H)/T.

use phalanx_ir::random::Stream;

use crate::corpus::checked_range;
use crate::{Corpus, DataError};

const BLOCK: u64 = 2048;
/// The likely candidate of a half has this many sixteenths of its probability.
const LIKELY: u8 = 13;

/// The built-in order-2 Markov corpus.
#[derive(Clone, Debug)]
pub struct MarkovCorpus {
    seed: u64,
    vocab: usize,
    tokens: u64,
    /// The tokens of the first half, then those of the second.
    halves: [Vec<i32>; 2],
    /// The label of each token when it is the previous one, and when it is the one before.
    labels: [Vec<u32>; 2],
}

impl MarkovCorpus {
    /// The smallest vocabulary it can be built over.
    pub const LEAST_VOCAB: usize = 10;

    /// A corpus of `tokens` tokens over a vocabulary of `vocab`, all of it determined by `seed`.
    pub fn new(seed: u64, vocab: usize, tokens: u64) -> Result<Self, DataError> {
        let most = i32::MAX as usize;
        let least = Self::LEAST_VOCAB;
        if !(least..=most).contains(&vocab) {
            return Err(DataError::MarkovVocabulary { least, most, found: vocab });
        }
        let half = vocab / 2;
        let dealt = shuffled(seed, "markov halves", 2 * half);
        let (first, second) = dealt.split_at(half);
        let of_half = |tokens: &[u32]| tokens.iter().map(|&token| token as i32).collect();
        let labels = |purpose| {
            let order = shuffled(seed, purpose, 2 * half);
            order.iter().map(|&place| place % half as u32).collect()
        };
        Ok(Self {
            seed,
            vocab,
            tokens,
            halves: [of_half(first), of_half(second)],
            labels: [labels("markov previous"), labels("markov one before")],
        })
    }

    /// The entropy of a token given all before it in its block, in nats: the source's rate,
    /// without the restarts that [`Corpus::entropy_floor`] includes.
    pub fn entropy_rate(&self) -> f64 {
        let likely = f64::from(LIKELY) / 32.0;
        let unlikely = 0.5 - likely;
        -2.0 * (likely * likely.ln() + unlikely * unlikely.ln())
    }

    /// How many of the vocabulary's tokens occur; all of them equally often.
    pub fn used_tokens(&self) -> usize {
        2 * self.halves[0].len()
    }

    /// The token that follows `before`, `previous`; five random bits of `die` decide which.
    fn follow(&self, before: i32, previous: i32, die: u8) -> i32 {
        let side = usize::from(die & 1);
        let source = if side == 0 { previous } else { before };
        let half = &self.halves[side];
        let shift = if (die >> 1) & 15 < LIKELY { 0 } else { half.len() / 2 };
        let place = self.labels[side][source as usize] as usize + shift;
        half[if place < half.len() { place } else { place - half.len() }]
    }
}

impl Corpus for MarkovCorpus {
    fn len_tokens(&self) -> u64 {
        self.tokens
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn read(&self, at: u64, out: &mut [i32]) -> Result<(), DataError> {
        let range = checked_range(self, at, out.len())?;
        let starts = Stream::named(self.seed, "markov starts");
        let throws = Stream::named(self.seed, "markov tokens");
        let mut dice = [0; 16];
        let (mut before, mut previous) = (0, 0);
        // Blocks start at multiples of sixteen, so the first iteration always draws random numbers.
        for position in at - at % BLOCK..range.end as u64 {
            let die = (position % 16) as usize;
            if die == 0 {
                dice = bytes(throws.words(position / 16));
            }
            let token = if position % BLOCK < 2 {
                starts.below(position, self.used_tokens() as u64) as i32
            } else {
                self.follow(before, previous, dice[die])
            };
            (before, previous) = (previous, token);
            if position >= at {
                out[(position - at) as usize] = token;
            }
        }
        Ok(())
    }

    fn entropy_floor(&self) -> Option<f64> {
        let restarts = 2.0 / BLOCK as f64;
        let uniform = (self.used_tokens() as f64).ln();
        Some(restarts * uniform + (1.0 - restarts) * self.entropy_rate())
    }

    fn describe(&self) -> String {
        format!("synthetic order-2 Markov corpus (vocabulary {}, seed {})", self.vocab, self.seed)
    }
}

/// The sixteen bytes of four words, in an order that is the same on every machine.
fn bytes(words: [u32; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (out, word) in bytes.chunks_exact_mut(4).zip(words) {
        out.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// `0..n` in a random order (Fisher and Yates).
fn shuffled(seed: u64, purpose: &str, n: usize) -> Vec<u32> {
    let stream = Stream::named(seed, purpose);
    let mut order: Vec<u32> = (0..n as u32).collect();
    for last in (1..n).rev() {
        order.swap(last, stream.below(last as u64, last as u64 + 1) as usize);
    }
    order
}
