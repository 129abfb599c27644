//! The weight file of a run: our own parameter names and layouts, in one `safetensors` file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use phalanx_ir::DType;

use super::error::HfError;
use super::file::{Entry, TensorFile, stage};
use super::tensor::{Stored, Tensor};

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

/// What a tensor of a weight file is, before its values are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The parameter's name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The element type of its values in memory.
    pub dtype: DType,
}

/// Writes parameters under our own names, each in the precision it has in memory, atomically: at
/// `path` is afterwards either the whole new file or what was there before.
pub fn save_params(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), HfError> {
    let layout = |(name, tensor): (&String, &Tensor)| Layout {
        name: name.clone(),
        shape: tensor.shape.clone(),
        dtype: tensor.dtype(),
    };
    let layouts: Vec<Layout> = tensors.iter().map(layout).collect();
    let in_order: Vec<&Tensor> = tensors.values().collect();
    stream_params(path, &layouts, metadata, |at| Some(in_order[at].clone()))
}

/// The same, with tensors that are asked for one after the other, in the order of their names: so not
/// more than one of them need be in memory. If one can't be had, nothing is written.
pub fn stream_params(
    path: &Path,
    layouts: &[Layout],
    metadata: &BTreeMap<String, String>,
    mut tensor: impl FnMut(usize) -> Option<Tensor>,
) -> Result<(), HfError> {
    let mut metadata = metadata.clone();
    metadata.insert(FORMAT.0.to_owned(), FORMAT.1.to_owned());
    let mut entries = Vec::with_capacity(layouts.len());
    for Layout { name, shape, dtype } in layouts {
        let stored = Stored::of(*dtype).ok_or_else(|| {
            HfError::tensor(path, name, dtype.name().to_owned(), "f64, f32, bf16 or f16")
        })?;
        entries.push(Entry { name: name.clone(), shape: shape.clone(), stored });
    }
    let staged = stage(path, &metadata, &entries, |at| {
        let Layout { name, shape, .. } = &layouts[at];
        let found = match tensor(at) {
            Some(tensor) if tensor.shape == *shape && tensor.is_whole() => {
                return Ok(Cow::Owned(tensor));
            }
            Some(tensor) => format!("shape {:?} with {} values", tensor.shape, tensor.len()),
            None => "nothing".to_owned(),
        };
        let expected = "as many values as the shape says";
        Err(HfError::tensor(path, name, found, expected))
    })?;
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
