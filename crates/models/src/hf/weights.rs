//! Parameters from any source: a folder, a run's file, memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use phalanx_ir::DType;

use super::error::HfError;
use super::tensor::WeightTensor;

/// What a parameter is, apart from its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The element type in which its values are stored.
    pub dtype: DType,
}

impl TensorInfo {
    /// How many values it has.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Parameters by our names and in our layouts. Ranges are read, in any float type, so the whole
/// model does not have to be in memory.
pub trait Weights: Sync {
    /// The descriptions of all parameters, sorted by name.
    fn layouts(&self) -> Vec<TensorInfo>;

    /// The description of one parameter.
    fn layout(&self, name: &str) -> Result<TensorInfo, HfError>;

    /// The values of a parameter in ranges of row-major indices, one range after the other, as
    /// native-endian bytes of a float type, rounded if they were wider.
    ///
    /// # Panics
    /// If `dtype` is no float that parameters are kept in.
    fn read_ranges(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Vec<u8>, HfError>;

    /// One whole parameter.
    fn read(&self, name: &str) -> Result<WeightTensor, HfError> {
        let layout = self.layout(name)?;
        let all = 0..layout.elements();
        let bytes = self.read_ranges(name, &[all], layout.dtype)?;
        Ok(WeightTensor::from_bytes(layout.shape, layout.dtype, &bytes))
    }
}

/// Tensors in memory.
impl Weights for BTreeMap<String, WeightTensor> {
    fn layouts(&self) -> Vec<TensorInfo> {
        self.iter().map(|(name, tensor)| describe(name, tensor)).collect()
    }

    fn layout(&self, name: &str) -> Result<TensorInfo, HfError> {
        Ok(describe(name, find(self, name)?))
    }

    fn read_ranges(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Vec<u8>, HfError> {
        let tensor = find(self, name)?;
        let mut out = Vec::new();
        for range in ranges {
            let bytes = tensor.to_bytes(range.clone(), dtype).ok_or_else(|| {
                let found = format!("{} values", tensor.len());
                HfError::tensor(memory(), name, found, format!("elements {range:?}"))
            })?;
            out.extend(bytes);
        }
        Ok(out)
    }
}

/// If there are fewer values than the shape says, the description counts the values.
fn describe(name: &str, tensor: &WeightTensor) -> TensorInfo {
    let shape = if tensor.is_whole() { tensor.shape.clone() } else { vec![tensor.len()] };
    TensorInfo { name: name.to_owned(), shape, dtype: tensor.dtype() }
}

fn find<'a>(
    tensors: &'a BTreeMap<String, WeightTensor>,
    name: &str,
) -> Result<&'a WeightTensor, HfError> {
    let missing = || HfError::tensor(memory(), name, "no such parameter", "one of the model's");
    tensors.get(name).ok_or_else(missing)
}

/// The text that errors show instead of a file name.
fn memory() -> &'static Path {
    Path::new("tensors in memory")
}
