//! A synthetic language whose best possible loss is known exactly.
//!
//! **The source.** Of a vocabulary of V, the first A = 2⌊V/2⌋ tokens are used and dealt at random
//! into two halves of h = A/2 tokens. Each token has two random labels in `0..h`, each label on
//! two tokens. The next token follows with probability ½ from the previous token and with
//! probability ½ from the one before it:
//!
//! | probability | next token                                                     |
//! |-------------|----------------------------------------------------------------|
//! | 0.4         | first half, at place label₁(previous)                          |
//! | 0.1         | first half, at place label₁(previous) + ⌊h/2⌋ (mod h)          |
//! | 0.4         | second half, at place label₂(the one before)                   |
//! | 0.1         | second half, at place label₂(the one before) + ⌊h/2⌋ (mod h)   |
//!
//! **Its entropy rate is exact.** Whatever the two previous tokens are, the four candidates
//! differ: two lie in one half, two in the other, and within a half their places differ by ⌊h/2⌋,
//! which is not 0 mod h for h ≥ 2. So the entropy of the next token given all before it is
//! H = −2·(0.4 ln 0.4 + 0.1 ln 0.1) ≈ 1.1935 nats in every context, and no stationary
//! distribution is needed. H is below 0.55 ln V from V = 9 on; 10 is the smallest allowed.
//!
//! **Unigram statistics are useless.** If both previous tokens are uniform over the A used ones
//! (however they depend on each other), then a label is uniform over `0..h`, hence so is each
//! place, and a token of either half has probability ½ · 1/h = 1/A. The first two tokens are drawn
//! uniformly, so every token is exactly uniform: unigram entropy ln A.
//!
//! **The previous token alone is not enough**: half the time the next token depends on the one
//! before it, which the previous token leaves open. And it is quickly learned, because what each
//! of the two contributes can be found without the other.
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
/// The probabilities of the two candidates of either half; together they make ½.
const LIKELY: f64 = 0.4;
const UNLIKELY: f64 = 0.1;
const LEAST_VOCAB: usize = 10;

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
    /// A corpus of `tokens` tokens over a vocabulary of `vocab`, all of it determined by `seed`.
    pub fn new(seed: u64, vocab: usize, tokens: u64) -> Result<Self, DataError> {
        let most = i32::MAX as usize;
        if !(LEAST_VOCAB..=most).contains(&vocab) {
            return Err(DataError::MarkovVocabulary {
                least: LEAST_VOCAB,
                most,
                found: vocab,
            });
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
        -2.0 * (LIKELY * LIKELY.ln() + UNLIKELY * UNLIKELY.ln())
    }

    /// How many of the vocabulary's tokens occur; all of them equally often.
    pub fn used_tokens(&self) -> usize {
        2 * self.halves[0].len()
    }

    /// The token that follows `before`, `previous` when the die shows `die` in `[0, 1)`.
    fn follow(&self, before: i32, previous: i32, die: f64) -> i32 {
        let (side, source) = if die < 0.5 {
            (0, previous)
        } else {
            (1, before)
        };
        let half = &self.halves[side];
        let likely = die - 0.5 * (side as f64) < LIKELY;
        let shift = if likely { 0 } else { half.len() / 2 };
        half[(self.labels[side][source as usize] as usize + shift) % half.len()]
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
        let dice = Stream::named(self.seed, "markov tokens");
        let (mut before, mut previous) = (0, 0);
        for position in at - at % BLOCK..range.end as u64 {
            let token = if position % BLOCK < 2 {
                dice.below(position, self.used_tokens() as u64) as i32
            } else {
                self.follow(before, previous, dice.uniform(position))
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
        format!(
            "synthetic order-2 Markov corpus ({} tokens, vocabulary {}, seed {})",
            self.tokens, self.vocab, self.seed
        )
    }
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
