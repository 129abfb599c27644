//! The fixtures of `tools/oracle`, and copies of them that tests may change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_models::hf::{HfError, ModelFolder, ModelSpec, WeightTensor, Weights};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

pub(crate) const CASES: [&str; 10] = [
    "gpt2",
    "gpt2_bare",
    "llama_gqa",
    "llama_hd6",
    "llama_tied",
    "llama_rope_old",
    "llama_rope_new",
    "mixtral",
    "t5",
    "t5_gated",
];

pub(crate) fn root() -> PathBuf {
    // Where the test runs, which may be another machine than the one that it was built on.
    let own = std::env::var_os("CARGO_MANIFEST_DIR");
    let own = own.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&own).join("../../tests/fixtures")
}

pub(crate) fn case(name: &str) -> PathBuf {
    root().join(name)
}

/// A model in memory as a whole, which only a small one may be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Loaded {
    pub(crate) spec: ModelSpec,
    pub(crate) tensors: BTreeMap<String, WeightTensor>,
}

/// Reads a whole model folder.
pub(crate) fn load(dir: &Path) -> Result<Loaded, HfError> {
    let source = ModelFolder::open(dir)?;
    Ok(Loaded { tensors: all(&source)?, spec: source.spec().clone() })
}

/// All tensors, by name.
pub(crate) fn all(weights: &dyn Weights) -> Result<BTreeMap<String, WeightTensor>, HfError> {
    let layouts = weights.layouts().into_iter();
    layouts.map(|layout| Ok((layout.name.clone(), weights.read(&layout.name)?))).collect()
}

/// An empty folder for one test.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if dir.exists() {
        std::fs::remove_dir_all(&dir).unwrap();
    }
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// A copy of a model's files that a test may damage.
pub(crate) fn copy(case_name: &str, scratch_name: &str) -> PathBuf {
    let dir = scratch(scratch_name);
    for entry in std::fs::read_dir(case(case_name)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("oracle") && name != "losses.json" {
            std::fs::copy(&path, dir.join(name)).unwrap();
        }
    }
    dir
}

pub(crate) type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The tensors of a file, read by the `safetensors` crate.
pub(crate) fn read_raw(path: &Path) -> Raw {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            let content = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), content)
        })
        .collect()
}

/// Writes tensors with the `safetensors` crate.
pub(crate) fn write_raw(path: &Path, tensors: &Raw) {
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| {
            let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
            (name.as_str(), view)
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A tensor of an oracle file in double precision; integers too.
pub(crate) fn numbers(raw: &Raw, name: &str) -> (Vec<usize>, Vec<f64>) {
    let (dtype, shape, data) = &raw[name];
    let values = match dtype {
        Dtype::F64 => data.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::F32 => {
            data.chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
        }
        Dtype::I32 => {
            data.chunks(4).map(|b| f64::from(i32::from_le_bytes(b.try_into().unwrap()))).collect()
        }
        other => panic!("unexpected type {other}"),
    };
    (shape.clone(), values)
}

/// The largest difference, relative to the largest expected entry.
pub(crate) fn error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let worst = found.iter().zip(expected).fold(0.0, |m: f64, (a, b)| m.max((a - b).abs()));
    worst / scale
}

pub(crate) fn shapes(tensors: &BTreeMap<String, WeightTensor>) -> BTreeMap<String, Vec<usize>> {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
}
