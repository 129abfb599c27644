//! What a trainer can be given as data: a corpus of tokens, or a table in memory.

use std::sync::Arc;

use phalanx_data::{Corpus, Loader, LoaderConfig, MarkovCorpus, Split, TextFile, TokenFile};
use phalanx_error::{Error, Problem, Result};
use phalanx_train::steps::Batches;

use crate::table::Table;

/// Data to train on or to evaluate: anything that converts into it can be given to
/// [`Trainer::data`](crate::Trainer::data).
///
/// ```
/// use phalanx::{Data, MarkovCorpus, Table};
///
/// let rows: Data = Table::new(2).input("x", vec![0.0, 1.0]).target("y", vec![1.0, 3.0]).into();
/// let tokens: Data = MarkovCorpus::new(0, 32, 1 << 20)?.into();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub enum Data {
    /// Tokens, for language models with the data ports `ids` and `targets`. A twentieth of them is
    /// held out: training never reads it, and evaluation reads nothing else.
    Tokens(Arc<dyn Corpus>),
    /// Columns of numbers, by name. Training and evaluation read all rows.
    Table(Table),
}

impl From<Table> for Data {
    fn from(table: Table) -> Self {
        Data::Table(table)
    }
}

impl From<&Table> for Data {
    /// Shares the columns; their values are not copied.
    fn from(table: &Table) -> Self {
        Data::Table(table.clone())
    }
}

impl From<Arc<dyn Corpus>> for Data {
    fn from(corpus: Arc<dyn Corpus>) -> Self {
        Data::Tokens(corpus)
    }
}

impl From<MarkovCorpus> for Data {
    fn from(corpus: MarkovCorpus) -> Self {
        Data::Tokens(Arc::new(corpus))
    }
}

impl From<TextFile> for Data {
    fn from(corpus: TextFile) -> Self {
        Data::Tokens(Arc::new(corpus))
    }
}

impl From<TokenFile> for Data {
    fn from(corpus: TokenFile) -> Self {
        Data::Tokens(Arc::new(corpus))
    }
}

/// How data is cut into batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cutting {
    pub(crate) seed: u64,
    pub(crate) batch: usize,
    pub(crate) seq_len: usize,
    pub(crate) microbatches: usize,
    /// Tokens at the beginning of each sample that are read and not predicted.
    pub(crate) unpredicted: usize,
}

impl Data {
    /// Starts giving out batches to train on; so many samples were given out before.
    pub(crate) fn open(self, cutting: Cutting, after: u64) -> Result<Box<dyn Batches>> {
        match self {
            Data::Table(table) => {
                Ok(Box::new(table.batches(cutting.seed, cutting.batch, after)?))
            }
            Data::Tokens(corpus) => Ok(Box::new(loader(corpus, cutting, Split::Train, after)?)),
        }
    }

    /// In words, for checkpoints.
    pub(crate) fn describe(&self) -> String {
        match self {
            Data::Table(table) => format!("a table of {} samples", table.samples()),
            Data::Tokens(corpus) => corpus.describe(),
        }
    }
}

/// Batches of tokens: of those that are trained on, or of those that are held out. So many samples were
/// given out before.
pub(crate) fn loader(
    corpus: Arc<dyn Corpus>,
    cutting: Cutting,
    split: Split,
    after: u64,
) -> Result<Loader> {
    let Cutting { seed, batch, seq_len, microbatches, unpredicted } = cutting;
    let usual = LoaderConfig::new(seed, seq_len, batch);
    let config = LoaderConfig { microbatches, split, unpredicted, ..usual };
    Loader::new(corpus, config, after)
        .map_err(|error| Error::refused(Problem::from(error.diagnostic()).caused_by(error)))
}
