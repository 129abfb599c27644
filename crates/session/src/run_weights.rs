//! The weights that a run left in its folder, with the model that they belong to.

use std::path::Path;

use phalanx_error::{Error, Problem, Result};
use phalanx_models::hf::{self, ModelSpec};

use crate::folders::FolderKind;

/// The name of the final weights within a run's folder.
pub const WEIGHTS: &str = "model.safetensors";
/// The header entry that holds the model's specification, in the form of a `config.json`.
pub const SPEC: &str = "model";

/// Opens the weights of a run; only their header is read. `instead` says what to write for a Hugging
/// Face folder, with `DIR` for its path.
pub fn open_run(dir: &Path, instead: &str) -> Result<(ModelSpec, hf::Params)> {
    FolderKind::Run.expect(dir, instead)?;
    let path = dir.join(WEIGHTS);
    if !path.exists() && !path.is_symlink() {
        return Err(Error::refused(
            Problem::new(format!("{} has no {WEIGHTS}", dir.display()))
                .because(
                    "a run writes its weights when it ends; this run has not ended, or this is not \
                    its folder",
                )
                .fix("give the folder of a finished run, such as runs/NAME"),
        ));
    }
    let weights = hf::Params::open(&path)?;
    let text = weights.metadata().get(SPEC).ok_or_else(|| {
        Error::refused(
            Problem::new(format!("{} does not say which model it holds", path.display()))
                .because("only models that Hugging Face knows can be told by their weights alone")
                .fix("give a file that `phalanx train` wrote"),
        )
    })?;
    Ok((hf::parse_config(text, &path)?, weights))
}
