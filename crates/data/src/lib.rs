//! Data: corpora, sampling, and the loader.
//!
//! A [`Corpus`] is a long sequence of tokens that can be read at any position. [`Sampler`] decides,
//! as a pure function of seed, epoch and index, which piece of it is the n-th training sample.
//! [`Loader`] turns consecutive samples into batches on its own thread; its only state is the
//! number of samples given out, so a run can resume exactly where it stopped.
#![forbid(unsafe_code)]

mod corpus;
mod error;
mod loader;
mod markov;
mod queue;
mod sampling;
mod text;
mod tokens;

pub use corpus::{Corpus, check_vocabulary};
pub use error::DataError;
pub use loader::{Batch, IGNORED, Loader, LoaderConfig};
pub use markov::MarkovCorpus;
pub use sampling::{DEFAULT_VAL_FRACTION, Permutation, Sampler, Split};
pub use text::TextFile;
pub use tokens::{TokenFile, TokenWidth};
