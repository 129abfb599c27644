//! What a trainer can be given as data: a corpus of tokens, or a table in memory.

use std::sync::Arc;

use phalanx_data::{Corpus, Loader, LoaderConfig, MarkovCorpus, Permutation, TextFile, TokenFile};
use phalanx_error::{Error, Problem, Result};
use phalanx_session::{Field, StepData, StepResult};
use phalanx_train::steps::Batches;

/// Data that a trainer can use.
pub enum Data {
    /// Tokens, for language models with the data ports `ids` and `targets`.
    Tokens(Arc<dyn Corpus>),
    /// Columns of numbers, by name.
    Table(Table),
}

impl From<Table> for Data {
    fn from(table: Table) -> Self {
        Data::Table(table)
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

impl Data {
    /// Starts giving out batches of `batch` samples.
    pub(crate) fn open(
        self,
        seed: u64,
        batch: usize,
        seq_len: usize,
        microbatches: usize,
    ) -> Result<Box<dyn Batches>> {
        match self {
            Data::Table(table) => Ok(Box::new(table.open(seed, batch)?)),
            Data::Tokens(corpus) => {
                let config =
                    LoaderConfig { microbatches, ..LoaderConfig::new(seed, seq_len, batch) };
                let loader = Loader::new(corpus, config, 0);
                let loader = loader.map_err(|e| Error::refused(e.diagnostic().into()))?;
                Ok(Box::new(loader))
            }
        }
    }
}

/// Samples in memory, each a row of every column. Training takes them in a new order each epoch.
#[derive(Clone, Debug)]
pub struct Table {
    samples: usize,
    columns: Vec<Column>,
}

#[derive(Clone, Debug)]
struct Column {
    name: String,
    values: Vec<f32>,
    /// Whether the loss is averaged over its elements.
    target: bool,
}

impl Table {
    /// A table of this many samples, still without columns.
    pub fn new(samples: usize) -> Self {
        Self { samples, columns: Vec::new() }
    }

    /// Adds a column that the model reads as the data port `name`, sample after sample.
    pub fn input(self, name: &str, values: Vec<f32>) -> Self {
        self.column(name, values, false)
    }

    /// Adds the column that the model predicts; the loss is averaged over its elements.
    pub fn target(self, name: &str, values: Vec<f32>) -> Self {
        self.column(name, values, true)
    }

    fn column(mut self, name: &str, values: Vec<f32>, target: bool) -> Self {
        let name = name.to_owned();
        self.columns.push(Column { name, values, target });
        self
    }

    fn open(self, seed: u64, batch: usize) -> Result<TableBatches> {
        for Column { name, values, .. } in &self.columns {
            if self.samples == 0 || values.is_empty() || values.len() % self.samples != 0 {
                let (found, samples) = (values.len(), self.samples);
                return Err(Error::refused(
                    Problem::new(format!(
                        "column `{name}` has {found} values for {samples} samples"
                    ))
                    .fix("give every sample the same number of values, at least one"),
                ));
            }
        }
        if !self.columns.iter().any(|column| column.target) {
            let problem = Problem::new("the table has no target column");
            return Err(Error::refused(
                problem.fix("add the column to predict with Table::target"),
            ));
        }
        let rooms = vec![Vec::new(); self.columns.len()];
        Ok(TableBatches { table: self, seed, batch, next: 0, rooms })
    }
}

/// Batches of a table; its only state is how many samples were given out.
struct TableBatches {
    table: Table,
    seed: u64,
    batch: usize,
    next: u64,
    /// The values of the current batch, by column.
    rooms: Vec<Vec<f32>>,
}

impl Batches for TableBatches {
    fn with_next(
        &mut self,
        run: &mut dyn FnMut(&StepData<'_>) -> Result<StepResult>,
    ) -> Result<StepResult> {
        let samples = self.table.samples as u64;
        let first_sample = self.next;
        self.next += self.batch as u64;
        self.rooms.iter_mut().for_each(Vec::clear);
        for sample in first_sample..self.next {
            let order = Permutation::new(self.seed, sample / samples, samples);
            let row = order.at(sample % samples) as usize;
            for (column, room) in self.table.columns.iter().zip(&mut self.rooms) {
                let width = column.values.len() / self.table.samples;
                room.extend(&column.values[row * width..(row + 1) * width]);
            }
        }
        let columns = self.table.columns.iter().zip(&self.rooms);
        let count = columns.clone().filter(|(column, _)| column.target);
        let count = count.map(|(_, room)| room.len() as u64).sum();
        let fields: Vec<(&str, Field<'_>)> =
            columns.map(|(column, room)| (column.name.as_str(), Field::F32(room))).collect();
        run(&StepData { fields: &fields, count, first_sample, scalars: &[] })
    }
}
