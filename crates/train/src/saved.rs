//! The weights that a run leaves behind, and reading a run's folder back.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_models::hf::{self, Spec};
use phalanx_models::{Architecture, hf::Tensor};

use crate::config::{Config, Loaded, Sources};
use crate::error::{Error, Problem, Result};
use crate::network;
use crate::rundir;

/// The header entry that holds the model's specification, in the form of a `config.json`.
const SPEC: &str = "model";
/// The header entry that holds the number of steps trained.
const STEPS: &str = "steps";

/// Writes the weights of a run, with what is needed to rebuild the model, whole or not at all.
pub fn save(
    path: &Path,
    spec: &Spec,
    steps: u64,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<()> {
    let metadata = BTreeMap::from([
        (SPEC.to_owned(), hf::config_text(spec)),
        (STEPS.to_owned(), steps.to_string()),
    ]);
    Ok(hf::save_params(path, tensors, &metadata)?)
}

/// A finished run, read back.
pub struct Saved {
    /// Its configuration.
    pub loaded: Loaded,
    /// The sizes of its model.
    pub spec: Spec,
    /// Its weights by parameter name.
    pub tensors: BTreeMap<String, Tensor>,
}

impl Saved {
    /// Reads the folder of a run; `sets` change single settings, as `--set` does.
    pub fn open(dir: &Path, sets: &[String]) -> Result<Self> {
        network::folder(dir)?;
        let path = dir.join(rundir::WEIGHTS);
        if !path.exists() {
            return Err(Error::refused(
                Problem::new(format!("{} has no {}", dir.display(), rundir::WEIGHTS))
                    .because("a run writes its weights when it ends; this one did not come to its end, or the folder is another one")
                    .fix("give the folder of a finished run, such as runs/NAME"),
            ));
        }
        let mut sources = Sources::default().file(dir.join(rundir::CONFIG));
        for set in sets {
            sources = sources.set(set);
        }
        let loaded = Config::load(&sources)?;
        let params = hf::load_params(&path)?;
        let text = params.metadata.get(SPEC).ok_or_else(|| {
            Error::refused(
                Problem::new(format!("{} does not say which model it holds", path.display()))
                    .fix("give a file that `phalanx train` wrote"),
            )
        })?;
        Ok(Self { spec: hf::parse_config(text, &path)?, loaded, tensors: params.tensors })
    }

    /// Its network.
    pub fn architecture(&self) -> Box<dyn Architecture> {
        network::architecture(&self.loaded.config.model, self.spec.clone())
    }

    /// Writes the model as a Hugging Face folder.
    pub fn export(&self, dir: &Path, dtype: DType) -> Result<()> {
        Ok(hf::save(dir, &self.spec, &self.tensors, dtype)?)
    }
}

/// Gives parameters out of tensors by name, for a session or an evaluation.
pub fn from_tensors(
    tensors: &BTreeMap<String, Tensor>,
) -> impl FnMut(&phalanx_ir::Param) -> Result<Vec<f64>> {
    |param| match tensors.get(&param.name) {
        Some(tensor) => Ok(tensor.to_f64()),
        None => Err(Error::refused(Problem::new(format!(
            "the weights have no parameter `{}`, which the model reads",
            param.name
        )))),
    }
}
