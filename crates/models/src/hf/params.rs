//! The weight file of a run: our own parameter names and layouts, in one `safetensors` file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use phalanx_ir::DType;

use super::error::HfError;
use super::file::{Entry, TensorFile, stage};
use super::names::Storage;
use super::tensor::{Stored, WeightTensor};
use super::view::View;
use super::weights::{TensorInfo, Weights};

/// The header entry that identifies this project's files, and its value.
const FORMAT: (&str, &str) = ("format", "phalanx");

/// An open weight file of this project. Opening reads only its header.
pub struct Params {
    file: TensorFile,
    metadata: BTreeMap<String, String>,
}

impl Params {
    /// Opens what [`stream_params`] wrote.
    pub fn open(path: &Path) -> Result<Self, HfError> {
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
        for name in file.names() {
            file.stored(&name)?;
        }
        Ok(Self { file, metadata })
    }

    /// The text entries that were saved with the parameters.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of tensors that were read so far, by all threads.
    pub fn bytes_read(&self) -> u64 {
        self.file.bytes_read()
    }

    fn shape(&self, name: &str) -> Result<&[usize], HfError> {
        self.file.shape(name).ok_or_else(|| {
            HfError::tensor(&self.file.path, name, "no such parameter", "one of the model's")
        })
    }
}

impl Weights for Params {
    fn layouts(&self) -> Vec<TensorInfo> {
        let names = self.file.names().into_iter();
        names.filter_map(|name| self.layout(&name).ok()).collect()
    }

    fn layout(&self, name: &str) -> Result<TensorInfo, HfError> {
        let shape = self.shape(name)?.to_vec();
        Ok(TensorInfo { name: name.to_owned(), shape, dtype: self.file.stored(name)?.dtype() })
    }

    fn read_ranges(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Vec<u8>, HfError> {
        let shape = self.shape(name)?;
        let view = View { file: &self.file, tensor: name, storage: Storage::Whole, shape };
        view.read(ranges, dtype)
    }
}

/// Writes parameters under our own names, each in its own element type, atomically: afterwards
/// `path` is either the complete new file or the old one. Tensors are asked for one after the
/// other, in the order of their layouts: so only one of them has to be in memory. If one cannot be
/// read, nothing is written.
pub fn stream_params(
    path: &Path,
    layouts: &[TensorInfo],
    metadata: &BTreeMap<String, String>,
    mut tensor: impl FnMut(usize) -> Option<WeightTensor>,
) -> Result<(), HfError> {
    let mut metadata = metadata.clone();
    metadata.insert(FORMAT.0.to_owned(), FORMAT.1.to_owned());
    let mut entries = Vec::with_capacity(layouts.len());
    for TensorInfo { name, shape, dtype } in layouts {
        let stored = Stored::of(*dtype).ok_or_else(|| {
            HfError::tensor(path, name, dtype.name().to_owned(), "f64, f32, bf16 or f16")
        })?;
        entries.push(Entry { name: name.clone(), shape: shape.clone(), stored });
    }
    let staged = stage(path, &metadata, &entries, |at, out| {
        let TensorInfo { name, shape, .. } = &layouts[at];
        let found = match tensor(at) {
            Some(tensor) if tensor.shape == *shape && tensor.is_whole() => {
                return Ok(tensor.encode(0..tensor.len(), entries[at].stored, out)?);
            }
            Some(tensor) => format!("shape {:?} with {} values", tensor.shape, tensor.len()),
            None => "nothing".to_owned(),
        };
        let expected = "as many values as the shape says";
        Err(HfError::tensor(path, name, found, expected).into())
    })?;
    staged.put_in_place().map_err(HfError::Write)
}
