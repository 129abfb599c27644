//! The weights of a checkpoint, for other programs.

use std::ops::Range;
use std::path::Path;

use phalanx_checkpoint::{CONFIG, Checkpoint, FULL};
use phalanx_config::{Config, Sources};
use phalanx_error::{Error, Problem, Result};
use phalanx_ir::DType;
use phalanx_models::hf::{self, HfError, ModelSpec, TensorInfo, Weights};
use phalanx_session::read_as;

use crate::export::export;

/// The weights of a checkpoint in full precision, read from its files where they are needed.
pub struct CheckpointWeights {
    checkpoint: Checkpoint,
    spec: ModelSpec,
}

impl CheckpointWeights {
    /// The weights of a checkpoint. Refuses one of a model that has no Hugging Face form.
    pub fn new(checkpoint: Checkpoint) -> Result<Self> {
        let Some(text) = &checkpoint.manifest().model else {
            let what = format!("{} holds a model of its own kind", checkpoint.path().display());
            let problem = Problem::new(what)
                .because("only GPT-2, LLaMA, Mixtral and T5 models can be exported");
            return Err(Error::refused(problem));
        };
        if checkpoint.replicas() > 1 {
            let (path, count) = (checkpoint.path().display(), checkpoint.replicas());
            let problem = Problem::new(format!("{path} holds {count} replicas that differ"))
                .because("they are one model again after the run's next average");
            let fix = "let the run go on (phalanx train --resume): its end is the mean of them";
            return Err(Error::refused(problem.fix(fix)));
        }
        let spec = hf::parse_config(text, checkpoint.path())?;
        Ok(Self { checkpoint, spec })
    }

    /// Writes them as a Hugging Face folder, one tensor at a time. Settings and files that belong to the
    /// model are taken from the folder that the run started from, if it is still there.
    pub fn export(&self, dir: &Path, dtype: DType) -> Result<()> {
        let config = self.checkpoint.path().join(CONFIG);
        let known = Config::load(&Sources::default().run(config)).ok();
        let from = known.and_then(|loaded| loaded.config.model.from);
        export(dir, &self.spec, self, dtype, from.as_ref()).map(drop)
    }

    fn unread(&self, name: &str, found: impl std::fmt::Display) -> HfError {
        HfError::tensor(self.checkpoint.path(), name, found.to_string(), "its values")
    }
}

impl Weights for CheckpointWeights {
    fn layouts(&self) -> Vec<TensorInfo> {
        let names: Vec<String> =
            self.checkpoint.params().map(|(name, _)| name.to_owned()).collect();
        names.iter().filter_map(|name| self.layout(name).ok()).collect()
    }

    fn layout(&self, name: &str) -> std::result::Result<TensorInfo, HfError> {
        let shape = self.checkpoint.params().find(|(other, _)| *other == name);
        let dtype = self.checkpoint.kinds(name).find(|(kind, _)| *kind == FULL);
        match (shape, dtype) {
            (Some((_, shape)), Some((_, dtype))) => {
                Ok(TensorInfo { name: name.to_owned(), shape: shape.to_vec(), dtype })
            }
            _ => Err(self.unread(name, "no such parameter")),
        }
    }

    fn read_ranges(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> std::result::Result<Vec<u8>, HfError> {
        let read = read_as(&self.checkpoint, (name, FULL, 0), ranges, dtype);
        read.map_err(|error| self.unread(name, error))
    }
}
