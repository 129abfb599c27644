//! The weights of a checkpoint, for other programs.

use std::ops::Range;
use std::path::Path;

use phalanx_checkpoint::Checkpoint;
use phalanx_error::{Error, Problem, Result};
use phalanx_inspect::writable::can_write;
use phalanx_ir::DType;
use phalanx_models::hf::{self, HfError, ModelSpec, TensorInfo, WeightTensor, Weights};
use phalanx_session::FULL;
use phalanx_session::run_weights::WEIGHTS;

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
            let problem = Problem::new(what).because("only GPT-2 and LLaMA models can be exported");
            return Err(Error::refused(problem));
        };
        let spec = hf::parse_config(text, checkpoint.path())?;
        Ok(Self { checkpoint, spec })
    }

    /// Writes them as a Hugging Face folder, one tensor at a time.
    pub fn export(&self, dir: &Path, dtype: DType) -> Result<()> {
        let made = std::fs::create_dir_all(dir);
        made.map_err(|error| Error::refused(Problem::io("cannot create", dir, &error)))?;
        for name in [WEIGHTS, "config.json"] {
            let what = format!("the model cannot be written to {}", dir.display());
            can_write(&dir.join(name), what)?;
        }
        Ok(hf::save(dir, &self.spec, self, dtype, &hf::KeptKeys::default())?)
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
        let read = self.checkpoint.read(name, FULL, ranges);
        let (stored, bytes) = read.map_err(|error| self.unread(name, error))?;
        let count = bytes.len() / stored.size();
        let values = WeightTensor::from_bytes(vec![count], stored, &bytes);
        values.to_bytes(0..count, dtype).ok_or_else(|| self.unread(name, "too few values"))
    }
}
