//! Data: corpora, sampling, and the loader.
//!
//! A [`Corpus`] is a long sequence of tokens that can be read at any position. [`Sampler`] decides,
//! as a pure function of seed, epoch and index, which piece of it is the n-th training sample.
//! [`Loader`] turns consecutive samples into batches on its own thread; its only state is the
//! number of samples given out, so a run can resume exactly where it stopped. [`Images`] are given out by
//! the same loader.
#![forbid(unsafe_code)]

mod corpus;
mod digits;
mod error;
mod idx;
mod images;
mod loader;
mod markov;
mod queue;
mod sampling;
mod text;
mod tokens;

pub use corpus::{Corpus, check_vocabulary};
pub use digits::Digits;
pub use error::DataError;
pub use idx::IdxImages;
pub use images::{DEVIATION, Images, MEAN, Samples};
pub use loader::{Batch, IGNORED, Loader, LoaderConfig};
pub use markov::MarkovCorpus;
pub use sampling::{DEFAULT_VAL_FRACTION, Permutation, Sampler, Split};
pub use text::TextFile;
pub use tokens::{TokenFile, TokenWidth};
