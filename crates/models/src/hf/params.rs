//! The weight file of a run: our own parameter names and layouts, in one `safetensors` file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use super::error::HfError;
use super::file::{Entry, TensorFile, stage};
use super::tensor::Tensor;

/// The header entry that tells this project's files from others, and its value.
const FORMAT: (&str, &str) = ("format", "phalanx");

/// The content of a weight file of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Parameters by our names.
    pub tensors: BTreeMap<String, Tensor>,
    /// The text entries that were saved with them.
    pub metadata: BTreeMap<String, String>,
}

/// Writes parameters under our own names, each in the precision it has in memory, atomically: at
/// `path` is afterwards either the whole new file or what was there before.
pub fn save_params(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), HfError> {
    let mut metadata = metadata.clone();
    metadata.insert(FORMAT.0.to_owned(), FORMAT.1.to_owned());
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        if !tensor.is_whole() {
            let found = format!("shape {:?} with {} values", tensor.shape, tensor.len());
            let expected = "as many values as the shape says";
            return Err(HfError::tensor(path, name, found, expected));
        }
        entries.push(Entry {
            name: name.clone(),
            shape: tensor.shape.clone(),
            stored: tensor.stored(),
        });
    }
    let in_order: Vec<&Tensor> = tensors.values().collect();
    let staged = stage(path, &metadata, &entries, |i| Cow::Borrowed(in_order[i]))?;
    staged.put_in_place().map_err(HfError::Write)
}

/// Reads what [`save_params`] wrote.
pub fn load_params(path: &Path) -> Result<Params, HfError> {
    let file = TensorFile::open(path)?;
    let mut metadata = file.metadata();
    let format = metadata.remove(FORMAT.0);
    if format.as_deref() != Some(FORMAT.1) {
        let found = match format {
            Some(format) => format!("\"{format}\""),
            None => "nothing".to_owned(),
        };
        let expected =
            "\"phalanx\": the weights of a run (a Hugging Face folder is read as hf:DIR)";
        return Err(HfError::key(path, "__metadata__.format", found, expected));
    }
    let names = file.names();
    let tensors: Result<_, HfError> =
        names.into_iter().map(|name| Ok((name.clone(), file.read(&name)?))).collect();
    Ok(Params { tensors: tensors?, metadata })
}
