//! The weights that a run leaves behind, and reading a run's folder back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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

    /// Writes the model as a Hugging Face folder, one tensor at a time. Settings and files that belong
    /// to the model are taken from the folder that its weights came from, if it is still there.
    /// Returns the names of the files that were copied.
    pub fn export(&self, dir: &Path, dtype: DType) -> Result<Vec<&'static str>> {
        self.check_out(dir)?;
        let source = self.source();
        let kept = match &source {
            Some(source) => hf::KeptKeys::read(&source.join(FolderKind::HuggingFace.mark()))?,
            None => hf::KeptKeys::default(),
        };
        hf::save(dir, &self.spec, &self.weights, dtype, &kept)?;
        let Some(source) = source else { return Ok(Vec::new()) };
        let mut copied = Vec::new();
        for name in COMPANIONS {
            let (from, to) = (source.join(name), dir.join(name));
            if !from.is_file() || same_file(&from, &to) {
                continue;
            }
            std::fs::copy(&from, &to).map_err(|e| {
                let from = from.display().to_string();
                Error::failed(Problem::io(&format!("cannot copy {from} to"), &to, &e))
            })?;
            copied.push(name);
        }
        Ok(copied)
    }

    /// The folder that the weights came from, if it is still there.
    fn source(&self) -> Option<PathBuf> {
        let Some(Origin::HuggingFace(dir)) = &self.loaded.config.model.from else { return None };
        dir.join(FolderKind::HuggingFace.mark()).is_file().then(|| dir.clone())
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

/// Files beside the weights that users of a model need, and that training does not change.
const COMPANIONS: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
];

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
