//! Writing weights as a Hugging Face folder.

use std::path::{Path, PathBuf};

use phalanx_config::Origin;
use phalanx_error::{Error, Problem, Result};
use phalanx_inspect::writable::can_write;
use phalanx_ir::DType;
use phalanx_models::hf::{self, ModelSpec, Weights};
use phalanx_session::folders::FolderKind;
use phalanx_session::run_weights::WEIGHTS;
use phalanx_sys::SysError;

use crate::rundir;

/// The file that lists weights which are in several files.
const INDEX: &str = "model.safetensors.index.json";

/// Writes weights as a Hugging Face folder, one tensor at a time. Settings and files that belong to the
/// model are taken from the folder that the weights came from, if it is still there. Returns the names
/// of the files that were copied.
pub(crate) fn export(
    dir: &Path,
    spec: &ModelSpec,
    weights: &dyn Weights,
    dtype: DType,
    from: Option<&Origin>,
) -> Result<Vec<&'static str>> {
    check_out(dir, from)?;
    let source = source(from);
    let kept = match &source {
        Some(source) => hf::KeptKeys::read(&source.join(FolderKind::HuggingFace.mark()))?,
        None => hf::KeptKeys::default(),
    };
    hf::save(dir, spec, weights, dtype, &kept)?;
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
fn source(from: Option<&Origin>) -> Option<PathBuf> {
    let Some(Origin::HuggingFace(dir)) = from else { return None };
    dir.join(FolderKind::HuggingFace.mark()).is_file().then(|| dir.clone())
}

/// Refuses a folder that cannot be written, or that holds what an export must not replace.
fn check_out(dir: &Path, from: Option<&Origin>) -> Result<()> {
    let shown = dir.display();
    let origin = match from {
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
