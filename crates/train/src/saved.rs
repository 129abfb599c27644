//! The weights that a run leaves behind, and reading a run's folder back.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_models::hf::{self, ModelSpec};
use phalanx_sys::SysError;

use crate::rundir;
use phalanx_config::{Config, Loaded, Origin, Sources};
use phalanx_error::{Error, Problem, Result};
use phalanx_inspect::writable::can_write;
use phalanx_session::Session;
use phalanx_session::folders::FolderKind;
use phalanx_session::network;
use phalanx_session::run_weights::{SPEC, WEIGHTS, open_run};

/// The file that lists weights which are in several files.
const INDEX: &str = "model.safetensors.index.json";
/// The header entry that holds the number of steps trained.
const STEPS: &str = "steps";

/// Writes the weights of a session, with what is needed to rebuild the model, atomically.
pub fn save(path: &Path, spec: &ModelSpec, session: &mut Session) -> Result<()> {
    let steps = session.steps();
    let metadata = BTreeMap::from([
        (SPEC.to_owned(), hf::config_text(spec)),
        (STEPS.to_owned(), steps.to_string()),
    ]);
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

    /// Writes the model as a Hugging Face folder, one tensor at a time.
    pub fn export(&self, dir: &Path, dtype: DType) -> Result<()> {
        self.check_out(dir)?;
        Ok(hf::save(dir, &self.spec, &self.weights, dtype)?)
    }

    /// Refuses a folder that cannot be written, or that holds what an export must not replace.
    fn check_out(&self, dir: &Path) -> Result<()> {
        let shown = dir.display();
        let origin = match &self.loaded.config.model.from {
            Some(Origin::HuggingFace(from)) => from.canonicalize().ok(),
            _ => None,
        };
        let taken = if dir.join(rundir::CONFIG).exists() {
            Some(("a run's folder", "exporting there would replace the run's own weights"))
        } else if origin.is_some() && origin == dir.canonicalize().ok() {
            let why = "exporting there would replace the weights that the run started from";
            Some(("the folder of model.from", why))
        } else if dir.join(INDEX).exists() {
            Some(("a folder of weights in several files", "old and new files would be mixed"))
        } else {
            None
        };
        if let Some((what, why)) = taken {
            let problem = Problem::new(format!("{shown} is {what}")).because(why);
            return Err(Error::refused(problem.fix("give another folder with --out")));
        }
        let made = std::fs::create_dir_all(dir);
        made.map_err(|error| {
            let error = SysError::on_file(dir, "making this folder", error);
            Error::refused(error.diagnostic().into())
        })?;
        for name in [WEIGHTS, FolderKind::HuggingFace.mark()] {
            can_write(&dir.join(name), format!("the model cannot be written to {shown}"))?;
        }
        Ok(())
    }
}
