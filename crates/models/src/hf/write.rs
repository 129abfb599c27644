//! Writing a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_sys::{Staged, SysError};

use super::config::{parse_config, write_config};
use super::error::HfError;
use super::file::{self, Entry};
use super::names::{self, HfParam, Storage};
use super::spec::Spec;
use super::tensor::{Stored, Tensor};

/// Writes `config.json` and `model.safetensors` into `dir`, which is made if need be. Both are
/// written in full before either takes its name, so that a failure leaves no mixture of old and
/// new. A tied head is not written: the configuration says where it is.
pub fn save(
    dir: &Path,
    spec: &Spec,
    tensors: &BTreeMap<String, Tensor>,
    dtype: DType,
) -> Result<(), HfError> {
    let (config_path, path) = (dir.join("config.json"), dir.join("model.safetensors"));
    let Some(stored) = Stored::of(dtype) else {
        let expected = "f64, f32, bf16 or f16";
        return Err(HfError::key(&config_path, "torch_dtype", dtype.name(), expected));
    };
    let config = write_config(spec, stored);
    // What could not be read back must not be written: the reader knows which models are possible.
    parse_config(&config, &config_path)?;
    let params = names::params(spec);
    check(&path, &params, tensors)?;

    let groups = groups(&params);
    let entries: Vec<Entry> = groups
        .iter()
        .map(|group| Entry { name: group[0].hf_name.clone(), shape: group[0].hf_shape(), stored })
        .collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let made = std::fs::create_dir_all(dir);
    made.map_err(|e| HfError::Write(SysError::on_file(dir, "making this folder", e)))?;
    let weights = file::stage(&path, &metadata, &entries, |i| Ok(gather(&groups[i], tensors)))?;
    let text = |out: &mut dyn Write| out.write_all(config.as_bytes());
    let config = Staged::write(&config_path, text).map_err(HfError::Write)?;
    weights.put_in_place().and_then(|()| config.put_in_place()).map_err(HfError::Write)
}

/// The parameters that share a tensor at Hugging Face, sorted by that tensor's name. Parts are in
/// order because the table lists them in order.
fn groups(params: &[HfParam]) -> Vec<Vec<&HfParam>> {
    let mut groups: BTreeMap<&str, Vec<&HfParam>> = BTreeMap::new();
    for param in params {
        groups.entry(&param.hf_name).or_default().push(param);
    }
    groups.into_values().collect()
}

fn gather<'a>(group: &[&HfParam], tensors: &'a BTreeMap<String, Tensor>) -> Cow<'a, Tensor> {
    let parts: Vec<&Tensor> = group.iter().map(|p| &tensors[&p.name]).collect();
    match group[0].storage {
        Storage::Whole => Cow::Borrowed(parts[0]),
        Storage::Transposed => Cow::Owned(parts[0].transposed()),
        Storage::Part { .. } => Cow::Owned(Tensor::join(&parts)),
    }
}

/// Refuses tensors that are not exactly the specification's parameters.
fn check(
    path: &Path,
    params: &[HfParam],
    tensors: &BTreeMap<String, Tensor>,
) -> Result<(), HfError> {
    for HfParam { name, shape, .. } in params {
        let found = match tensors.get(name) {
            Some(tensor) if tensor.shape == *shape && tensor.is_whole() => continue,
            Some(tensor) => format!("shape {:?} with {} values", tensor.shape, tensor.len()),
            None => "nothing".to_owned(),
        };
        let expected = format!("shape {shape:?}");
        return Err(HfError::tensor(path, name, found, expected));
    }
    let known: BTreeSet<&str> = params.iter().map(|p| p.name.as_str()).collect();
    match tensors.iter().find(|(name, _)| !known.contains(name.as_str())) {
        None => Ok(()),
        Some((name, tensor)) => {
            let found = format!("shape {:?}", tensor.shape);
            Err(HfError::tensor(path, name, found, "no such parameter"))
        }
    }
}
