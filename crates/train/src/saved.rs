//! The weights that a run leaves behind, and reading a run's folder back.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_models::hf::{self, ModelSpec};

use crate::export::export;
use crate::rundir;
use phalanx_config::{Config, Loaded, Sources};
use phalanx_error::Result;
use phalanx_session::Session;
use phalanx_session::network;
use phalanx_session::run_weights::{SPEC, WEIGHTS, open_run};

/// The header entry that holds the number of steps trained.
const STEPS: &str = "steps";

/// Writes the weights of a session, with what is needed to rebuild the model, atomically.
pub fn save(path: &Path, spec: Option<&ModelSpec>, session: &mut Session) -> Result<()> {
    let steps = session.steps();
    let mut metadata = BTreeMap::from([(STEPS.to_owned(), steps.to_string())]);
    metadata.extend(spec.map(|spec| (SPEC.to_owned(), hf::config_text(spec))));
    save_weights(path, &metadata, session)
}

/// Writes the weights of a session with metadata, atomically. Only one tensor is in memory at a
/// time.
pub fn save_weights(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    session: &mut Session,
) -> Result<()> {
    let dtype = session.state_dtype();
    let mut params: Vec<(usize, hf::TensorInfo)> = (session.parameters().iter().enumerate())
        .map(|(number, p)| {
            (number, hf::TensorInfo { name: p.name.clone(), shape: p.shape.clone(), dtype })
        })
        .collect();
    params.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
    let (numbers, layouts): (Vec<usize>, Vec<hf::TensorInfo>) = params.into_iter().unzip();
    let mut failed = None;
    let written = hf::stream_params(path, &layouts, metadata, |at| {
        session.param(numbers[at]).map_err(|error| failed = Some(error)).ok()
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(written?),
    }
}

/// A finished run, read back: metadata is read at once, weights when they are needed.
pub struct Saved {
    /// Its configuration.
    pub loaded: Loaded,
    /// The sizes of its model.
    pub spec: ModelSpec,
    /// Its weights.
    pub weights: hf::Params,
}

impl Saved {
    /// Reads the folder of a run. The configuration is the one it trained with, changed by `over`;
    /// the model's shape does not change.
    pub fn open(dir: &Path, over: &Sources) -> Result<Self> {
        let (spec, weights) = open_run(dir, "phalanx eval --model hf:DIR; it needs no export")?;
        let path = dir.join(WEIGHTS);
        let sources = over.clone().run(dir.join(rundir::CONFIG));
        let shape = network::shape_keys(&spec);
        let loaded = Config::load(&sources.pin(path.display().to_string(), shape))?;
        Ok(Self { spec, loaded, weights })
    }

    /// Writes the model as a Hugging Face folder, one tensor at a time. Settings and files that belong
    /// to the model are taken from the folder that its weights came from, if it is still there.
    /// Returns the names of the files that were copied.
    pub fn export(&self, dir: &Path, dtype: DType) -> Result<Vec<&'static str>> {
        export(dir, &self.spec, &self.weights, dtype, self.loaded.config.model.from.as_ref())
    }
}
