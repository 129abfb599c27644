//! What every source of tokens can do.

use crate::DataError;

/// A long sequence of tokens that can be read at any position, by any thread.
pub trait Corpus: Send + Sync {
    /// How many tokens there are.
    fn len_tokens(&self) -> u64;

    /// One more than the largest token id that can occur.
    fn vocab(&self) -> usize;

    /// Fills `out` with the tokens from position `at` on.
    ///
    /// The result depends on `at` and the corpus alone, never on what was read before.
    fn read(&self, at: u64, out: &mut [i32]) -> Result<(), DataError>;

    /// The loss that no model can beat, in nats per token, if it is known.
    fn entropy_floor(&self) -> Option<f64> {
        None
    }

    /// One line of text: what it is and how large.
    fn describe(&self) -> String;
}

/// Fails unless a model with `model_vocab` token ids can read `corpus`.
pub fn check_vocabulary(corpus: &dyn Corpus, model_vocab: usize) -> Result<(), DataError> {
    if corpus.vocab() > model_vocab {
        return Err(DataError::Vocabulary {
            corpus: corpus.describe(),
            needed: corpus.vocab(),
            model: model_vocab,
        });
    }
    Ok(())
}

/// The range `at..at + wanted` as indices, or the error that says how long the corpus is.
pub(crate) fn checked_range(
    corpus: &dyn Corpus,
    at: u64,
    wanted: usize,
) -> Result<std::ops::Range<usize>, DataError> {
    let tokens = corpus.len_tokens();
    match at.checked_add(wanted as u64) {
        Some(end) if end <= tokens => Ok(at as usize..end as usize),
        _ => Err(DataError::BeyondEnd { corpus: corpus.describe(), at, wanted, tokens }),
    }
}
