//! `phalanx checkpoint`: what a checkpoint holds, whether it is whole, and its weights for others.

use std::path::Path;

use phalanx::checkpoint::Checkpoint;
use phalanx::error::{Result, bytes, counted};
use phalanx::ir::DType;
use phalanx::train::{CheckpointWeights, Resume};
use serde_json::json;

use crate::args::CheckpointCommand;
use crate::out;

/// Carries out a subcommand.
pub(crate) fn run(command: &CheckpointCommand) -> Result<()> {
    let open = |dir: &Path| -> Result<Checkpoint> {
        let found = Resume::in_folder(dir)?;
        found.notes().iter().for_each(|note| out::error(&format!("note: {note}")));
        Ok(found.checkpoint)
    };
    match command {
        CheckpointCommand::Show { dir, json } => {
            show(&open(dir)?, *json);
            Ok(())
        }
        CheckpointCommand::Check { dir, json } => {
            // Who asks about a run wants to know of all that is damaged, not only what is left.
            let Resume { checkpoint, damaged, .. } = Resume::in_folder(dir)?;
            match damaged.into_iter().next() {
                None => check(&checkpoint, *json),
                Some(error) => Err(error),
            }
        }
        CheckpointCommand::Convert { dir, to } => {
            convert(open(dir)?, &to.out, to.dtype.into(), to.json)
        }
    }
}

fn show(checkpoint: &Checkpoint, as_json: bool) {
    let (manifest, path) = (checkpoint.manifest(), checkpoint.path().display().to_string());
    let size: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    let params: Vec<(&str, &[usize])> = checkpoint.params().collect();
    let elements: usize = params.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    if as_json {
        out::json(&json!({
            "path": path, "step": manifest.step, "samples": manifest.samples, "bytes": size,
            "parameters": elements, "kinds": manifest.kinds, "layout": manifest.layout,
            "corpus": manifest.corpus,
            "files": manifest.files.iter().map(|file| &file.name).collect::<Vec<_>>(),
        }));
        return;
    }
    let kinds: Vec<&str> = manifest.kinds.keys().map(String::as_str).collect();
    let files = counted(manifest.files.len(), "file");
    out::line(&path);
    out::line(&format!("after   step {}, {} samples", manifest.step, manifest.samples));
    out::line(&format!("ranks   {}", manifest.layout));
    out::line(&format!("data    {}", manifest.corpus));
    out::line(&format!("size    {} in {files}", bytes(size)));
    let tensors = counted(params.len(), "parameter tensor");
    out::line(&format!("state   {elements} values in {tensors}; of each: {}", kinds.join(", ")));
    for (name, shape) in params {
        let kinds: Vec<String> =
            checkpoint.kinds(name).map(|(kind, dtype)| format!("{kind} {dtype}")).collect();
        out::line(&format!("  {name} {shape:?}: {}", kinds.join(", ")));
    }
}

fn check(checkpoint: &Checkpoint, as_json: bool) -> Result<()> {
    let checked = checkpoint.check(|_| ())?;
    let path = checkpoint.path().display().to_string();
    if as_json {
        out::json(&json!({
            "ok": true, "path": path, "files": checked.files, "bytes": checked.bytes,
            "elements": checked.elements,
        }));
        return Ok(());
    }
    let (files, size) = (counted(checked.files, "file"), bytes(checked.bytes));
    let elements = checked.elements;
    out::line(&format!("{path} is whole: {files}, {size}, and each of {elements} values once"));
    Ok(())
}

fn convert(checkpoint: Checkpoint, to: &Path, dtype: DType, as_json: bool) -> Result<()> {
    let shown = checkpoint.path().display().to_string();
    CheckpointWeights::new(checkpoint)?.export(to, dtype)?;
    let to = to.display().to_string();
    if as_json {
        out::json(&json!({ "from": shown, "out": to, "dtype": dtype.name() }));
    } else {
        out::line(&format!("{to}: the weights of {shown} in {dtype}, for transformers"));
    }
    Ok(())
}
