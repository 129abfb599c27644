//! What a training run leaves: losses, weights, and what it planned.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_error::Result;
use phalanx_models::hf::{self, Tensor};
use phalanx_script::Category;

/// What a training run leaves.
#[derive(Clone, Debug)]
pub struct Report {
    /// The loss of every step, before its update.
    pub losses: Vec<f64>,
    /// The trained parameters by name.
    pub params: BTreeMap<String, Tensor>,
    /// The ranks and how they divided the work, in one line.
    pub layout: String,
    /// By category: the bytes that a rank plans for a step, as a peak.
    pub memory: Vec<(Category, usize)>,
    /// Bytes that ranks move between them in a step, over all ranks: a prediction from types, which
    /// `phalanx verify` holds against what is counted.
    pub moved: u64,
}

impl Report {
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

    /// Writes the parameters as a `safetensors` file, whole or not at all.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        Ok(hf::save_params(path.as_ref(), &self.params, &BTreeMap::new())?)
    }
}
