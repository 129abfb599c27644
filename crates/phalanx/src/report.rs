//! The result of a training run: losses, weights, and its plan.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_error::Result;
use phalanx_ir::Param;
use phalanx_models::hf::WeightTensor;
use phalanx_script::Category;
use phalanx_session::Session;
use phalanx_train::saved;

use crate::weights;

/// The result of a training run.
///
/// ```
/// use phalanx::{Category, Mlp, Table, Trainer};
///
/// let data = Table::new(2).input("x", vec![0.0, 1.0]).target("y", vec![1.0, 3.0]);
/// let report = Trainer::new(Mlp::regression(1, [], 1)).data(data).batch(2).steps(3).run()?;
/// assert_eq!(report.losses.len(), 3);
/// assert_eq!(report.param("layers.0.weight")?.shape, [1, 1]);
/// assert!(report.bytes(Category::Weights) >= 8);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Each rank keeps its part of the trained weights until the report is dropped: [`Report::param`]
/// reads one of them, [`Report::save`] writes them all.
pub struct Report {
    /// The loss of every step, before its update.
    pub losses: Vec<f64>,
    /// The model's parameters: their names and shapes.
    pub params: Vec<Param>,
    /// The ranks and how they divided the work, in one line.
    pub layout: String,
    /// For each category: the peak bytes that a rank plans for a step.
    pub memory: Vec<(Category, usize)>,
    /// Bytes that ranks exchange in a step, over all ranks: a prediction from types, which
    /// `phalanx verify` compares with what is counted.
    pub moved: u64,
    /// Holds the weights. Reading them is a command to its ranks, which needs the lock.
    session: Mutex<Session>,
}

impl Report {
    pub(crate) fn new(losses: Vec<f64>, session: Session) -> Self {
        Self {
            losses,
            params: session.parameters().to_vec(),
            layout: session.layout().to_owned(),
            memory: session.memory().peaks.clone(),
            moved: session.moved().values().map(|moved| moved.bytes).sum(),
            session: Mutex::new(session),
        }
    }

    /// The loss of the first step, or NaN if there was none.
    pub fn first_loss(&self) -> f64 {
        self.losses.first().copied().unwrap_or(f64::NAN)
    }

    /// The loss of the last step, or NaN if there was none.
    pub fn last_loss(&self) -> f64 {
        self.losses.last().copied().unwrap_or(f64::NAN)
    }

    /// The bytes that a rank plans for one category.
    pub fn bytes(&self, category: Category) -> usize {
        self.memory.iter().find(|(c, _)| *c == category).map_or(0, |(_, bytes)| *bytes)
    }

    /// Reads a trained parameter by its name, whole and in full precision, even if it is sharded
    /// over ranks.
    pub fn param(&self, name: &str) -> Result<WeightTensor> {
        self.session().param(weights::find(&self.params, name)?)
    }

    /// Writes the trained parameters as a `safetensors` file, atomically. Only one of them is in
    /// memory at a time.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        saved::save_weights(path.as_ref(), &BTreeMap::new(), &mut self.session())
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        // Readers change nothing, so a panic in one of them does no harm.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report")
            .field("losses", &self.losses)
            .field("layout", &self.layout)
            .field("moved", &self.moved)
            .finish_non_exhaustive()
    }
}
