//! Samples in memory: columns of floats and of whole numbers.

use std::ops::Range;
use std::sync::Arc;

use phalanx_data::Permutation;
use phalanx_error::Result;
use phalanx_ir::{DType, Instr, Model, Op, Program, Role, ValueId};
use phalanx_session::{Field, StepData};
use phalanx_train::steps::Batches;

use crate::mistake::Mistake;

/// Samples in memory, each a row of every column. Training takes them in a new order each epoch.
///
/// A column has the name of the data port that reads it: `x` and `y` of an [`Mlp`](crate::Mlp),
/// `ids` and `targets` of a language model, or the names that your own model gives
/// [`Builder::data`](crate::Builder::data). Copies of a table share their values.
///
/// ```
/// use phalanx::Table;
///
/// // Three samples of two features, with a class each.
/// let x = vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
/// let classes = Table::new(3).input("x", x.clone()).labels("y", vec![0, 1, 1]);
/// // The same samples, with a number to predict.
/// let numbers = Table::new(3).input("x", x).target("y", vec![0.5, 1.5, 2.5]);
/// assert_eq!((classes.samples(), numbers.samples()), (3, 3));
/// ```
#[derive(Clone, Debug)]
pub struct Table {
    samples: usize,
    columns: Vec<Column>,
}

#[derive(Clone, Debug)]
struct Column {
    name: String,
    values: Values,
    /// Whether the loss is averaged over its elements.
    target: bool,
}

#[derive(Clone, Debug)]
enum Values {
    F32(Arc<Vec<f32>>),
    I32(Arc<Vec<i32>>),
}

impl Table {
    /// A table of this many samples, still without columns.
    pub fn new(samples: usize) -> Self {
        Self { samples, columns: Vec::new() }
    }

    /// Adds a column of floats that the model reads as the data port `name`, sample after sample.
    pub fn input(self, name: &str, values: Vec<f32>) -> Self {
        self.column(name, Values::F32(Arc::new(values)), false)
    }

    /// Adds a column of whole numbers that the model reads as the data port `name`, such as tokens.
    pub fn ids(self, name: &str, values: Vec<i32>) -> Self {
        self.column(name, Values::I32(Arc::new(values)), false)
    }

    /// Adds the column of floats that the model predicts; the loss is averaged over its elements.
    pub fn target(self, name: &str, values: Vec<f32>) -> Self {
        self.column(name, Values::F32(Arc::new(values)), true)
    }

    /// Adds the column of classes that the model predicts; the loss is averaged over those that are
    /// not negative. [`Training::evaluate`](crate::Training::evaluate) then tells the accuracy.
    pub fn labels(self, name: &str, values: Vec<i32>) -> Self {
        self.column(name, Values::I32(Arc::new(values)), true)
    }

    /// How many samples it has.
    pub fn samples(&self) -> usize {
        self.samples
    }

    fn column(mut self, name: &str, values: Values, target: bool) -> Self {
        let name = name.to_owned();
        self.columns.push(Column { name, values, target });
        self
    }

    /// The only column of labels, if there is one.
    pub(crate) fn only_labels(&self) -> Option<&[i32]> {
        let labels = |column: &'_ Column| column.target && column.values.dtype() == DType::I32;
        let mut found = self.columns.iter().filter(|column| labels(column));
        match (found.next().map(|column| &column.values), found.next()) {
            (Some(Values::I32(values)), None) => Some(values),
            _ => None,
        }
    }

    /// Refuses columns that contradict each other, and a model that reads other columns.
    pub(crate) fn check(&self, model: &Model) -> Result<(), Mistake> {
        for (number, Column { name, values, .. }) in self.columns.iter().enumerate() {
            if self.columns[..number].iter().any(|other| other.name == *name) {
                return Err(Mistake::ColumnTwice { name: name.clone() });
            }
            let (found, samples) = (values.len(), self.samples);
            if samples == 0 || found == 0 || found % samples != 0 {
                return Err(Mistake::Ragged { name: name.clone(), found, samples });
            }
        }
        for program in model.segments() {
            for port in program.inputs_with(Role::Data) {
                let ty = program.ty(port.value);
                let expected = ty.shape.iter().skip(1).product();
                self.check_port(&port.name, ty.dtype, expected)?;
                if let Some(range) = allowed(program, port.value) {
                    self.check_range(&port.name, range)?;
                }
            }
        }
        Ok(())
    }

    fn check_range(&self, name: &str, allowed: Range<i32>) -> Result<(), Mistake> {
        let Some(column) = self.columns.iter().find(|column| column.name == name) else {
            return Ok(());
        };
        let Values::I32(values) = &column.values else { return Ok(()) };
        let Some(at) = values.iter().position(|value| !allowed.contains(value)) else {
            return Ok(());
        };
        let (name, sample) = (name.to_owned(), at * self.samples / values.len());
        Err(Mistake::OutOfRange { name, sample, value: values[at], end: allowed.end })
    }

    fn check_port(&self, port: &str, dtype: DType, expected: usize) -> Result<(), Mistake> {
        let port = port.to_owned();
        let Some(column) = self.columns.iter().find(|column| column.name == port) else {
            let given = self.columns.iter().map(|column| column.name.clone()).collect();
            return Err(Mistake::NoColumn { port, given });
        };
        let found = column.values.dtype();
        if found != dtype {
            let target = column.target;
            return Err(Mistake::ColumnType { name: port, found, expected: dtype, target });
        }
        let found = column.values.len() / self.samples;
        match found == expected {
            true => Ok(()),
            false => Err(Mistake::ColumnWidth { name: port, found, expected }),
        }
    }

    /// Starts giving out batches of this many samples; so many samples were given out before.
    pub(crate) fn batches(
        self,
        seed: u64,
        batch: usize,
        next: u64,
    ) -> Result<TableBatches, Mistake> {
        match self.columns.iter().any(|column| column.target) {
            true => Ok(TableBatches { rows: Rows::new(&self), table: self, seed, batch, next }),
            false => Err(Mistake::NoTarget),
        }
    }
}

/// The values that a data port may have, by the first op that looks something up with it: classes
/// of a cross-entropy, where negative ones do not count, or rows of an embedding.
fn allowed(program: &Program, port: ValueId) -> Option<Range<i32>> {
    let reads = |instr: &&Instr| instr.inputs.get(1) == Some(&port);
    program.instrs().iter().filter(reads).find_map(|instr| {
        let shape = &program.ty(instr.inputs[0]).shape;
        let end = |extent: Option<&usize>| i32::try_from(*extent?).ok();
        match instr.op {
            Op::CrossEntropy(_) => Some(i32::MIN..end(shape.last())?),
            Op::Embedding(_) => Some(0..end(shape.first())?),
            _ => None,
        }
    })
}

impl Values {
    fn len(&self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::I32(values) => values.len(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Values::F32(_) => DType::F32,
            Values::I32(_) => DType::I32,
        }
    }
}

/// Some rows of a table, copied next to each other: the data of a step.
pub(crate) struct Rows {
    columns: Vec<(String, RowValues, bool)>,
}

enum RowValues {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl Rows {
    /// Room for rows of such tables.
    pub(crate) fn new(table: &Table) -> Self {
        let room = |column: &Column| {
            let values = match column.values {
                Values::F32(_) => RowValues::F32(Vec::new()),
                Values::I32(_) => RowValues::I32(Vec::new()),
            };
            (column.name.clone(), values, column.target)
        };
        Self { columns: table.columns.iter().map(room).collect() }
    }

    pub(crate) fn clear(&mut self) {
        for (_, values, _) in &mut self.columns {
            match values {
                RowValues::F32(room) => room.clear(),
                RowValues::I32(room) => room.clear(),
            }
        }
    }

    /// Appends a row of a table. Columns are found by name and element type, in any order.
    pub(crate) fn push(&mut self, table: &Table, row: usize) {
        for (name, room, _) in &mut self.columns {
            for column in table.columns.iter().filter(|column| column.name == *name) {
                let width = column.values.len() / table.samples;
                let own = row * width..(row + 1) * width;
                match (&mut *room, &column.values) {
                    (RowValues::F32(room), Values::F32(values)) => room.extend(&values[own]),
                    (RowValues::I32(room), Values::I32(values)) => room.extend(&values[own]),
                    // A column that the model does not read; those that it reads were checked.
                    _ => {}
                }
            }
        }
    }

    /// What the loss is averaged over: elements of targets, labels that are not negative.
    pub(crate) fn count(&self) -> u64 {
        let targets = self.columns.iter().filter(|(_, _, target)| *target);
        let count = |values: &RowValues| match values {
            RowValues::F32(values) => values.len(),
            RowValues::I32(values) => values.iter().filter(|label| **label >= 0).count(),
        };
        targets.map(|(_, values, _)| count(values) as u64).sum()
    }

    /// Gives the rows to `run` as the data of a step whose loss is divided by `count`.
    pub(crate) fn with<T>(
        &self,
        first_sample: u64,
        count: u64,
        run: impl FnOnce(&StepData<'_>) -> T,
    ) -> T {
        let fields: Vec<(&str, Field<'_>)> = (self.columns.iter())
            .map(|(name, values, _)| match values {
                RowValues::F32(values) => (name.as_str(), Field::F32(values)),
                RowValues::I32(values) => (name.as_str(), Field::I32(values)),
            })
            .collect();
        run(&StepData { fields: &fields, count, first_sample, scalars: &[] })
    }
}

/// Batches of a table; its only state is how many samples were given out.
pub(crate) struct TableBatches {
    table: Table,
    seed: u64,
    batch: usize,
    next: u64,
    rows: Rows,
}

impl Batches for TableBatches {
    fn with_next(&mut self, run: &mut dyn FnMut(&StepData<'_>) -> Result<()>) -> Result<()> {
        let samples = self.table.samples as u64;
        let first_sample = self.next;
        self.next += self.batch as u64;
        self.rows.clear();
        for sample in first_sample..self.next {
            let order = Permutation::new(self.seed, sample / samples, samples);
            self.rows.push(&self.table, order.at(sample % samples) as usize);
        }
        // A batch without a valid label has the loss 0.
        self.rows.with(first_sample, self.rows.count().max(1), run)
    }
}
