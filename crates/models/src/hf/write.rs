//! Writing a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_sys::{Staged, SysError};

use super::config::{KeptKeys, parse_config, write_config};
use super::error::HfError;
use super::file::{self, Entry, Unwritten};
use super::mixtral;
use super::names::{self, HfParam, Storage};
use super::spec::ModelSpec;
use super::tensor::{Stored, WeightTensor};
use super::view::gather;
use super::weights::{TensorInfo, Weights};

/// Writes `config.json` and `model.safetensors` into `dir`, which is created if it does not exist.
/// Both are written completely before they get their names, so that a failure leaves no mixture of
/// old and new files. A tied head is not written: the configuration says that it is the embedding.
/// `kept` goes into the configuration. Weights are read while they are written, so only one tensor is in memory.
pub fn save(
    dir: &Path,
    spec: &ModelSpec,
    weights: &dyn Weights,
    dtype: DType,
    kept: &KeptKeys,
) -> Result<(), HfError> {
    let (config_path, path) = (dir.join("config.json"), dir.join("model.safetensors"));
    let Some(stored) = Stored::of(dtype) else {
        let expected = "f64, f32, bf16 or f16";
        return Err(HfError::key(&config_path, "torch_dtype", dtype.name(), expected));
    };
    if let ModelSpec::Mixtral(spec) = spec {
        mixtral::exchangeable(spec, &config_path)?;
    }
    let config = write_config(spec, stored, kept);
    // A model that could not be read back must not be written: the reader checks which models are
    // possible.
    parse_config(&config, &config_path)?;
    let params = names::params(spec);
    check(&path, &params, &weights.layouts())?;

    let groups = groups(&params);
    let entries: Vec<Entry> = groups
        .iter()
        .map(|group| Entry { name: group[0].hf_name.clone(), shape: group[0].hf_shape(), stored })
        .collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let made = std::fs::create_dir_all(dir);
    made.map_err(|e| HfError::Write(SysError::on_file(dir, "making this folder", e)))?;
    let weights = file::stage(&path, &metadata, &entries, |i, out| {
        Writer { path: &path, weights, stored, out }.group(&groups[i])
    })?;
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

/// Elements that are read at a time.
const PIECE: usize = 1 << 16;

/// Writes parameters in the layouts of Hugging Face.
struct Writer<'a> {
    path: &'a Path,
    weights: &'a dyn Weights,
    stored: Stored,
    out: &'a mut dyn Write,
}

impl Writer<'_> {
    /// The tensor that holds these parameters.
    fn group(&mut self, group: &[&HfParam]) -> Result<(), Unwritten> {
        match group[0].storage {
            Storage::Whole => self.whole(group[0]),
            Storage::Transposed => self.transposed(group[0], 0),
            Storage::Matrix { number } => self.transposed(group[0], number),
            Storage::Part { .. } => self.side_by_side(group),
        }
    }

    fn whole(&mut self, param: &HfParam) -> Result<(), Unwritten> {
        let elements: usize = param.shape.iter().product();
        for from in (0..elements).step_by(PIECE) {
            let piece = self.read(param, from..elements.min(from + PIECE))?;
            piece.encode(0..piece.len(), self.stored, self.out)?;
        }
        Ok(())
    }

    /// Writes one row of each part in turn; reads as many rows at a time as fit into one piece.
    fn side_by_side(&mut self, parts: &[&HfParam]) -> Result<(), Unwritten> {
        let share = parts[0].shape.last().copied().unwrap_or(1);
        let rows = parts[0].shape.iter().product::<usize>() / share;
        let band = (PIECE / share).max(1);
        for from in (0..rows).step_by(band) {
            let band = from..rows.min(from + band);
            let elements = band.start * share..band.end * share;
            let read = |part: &&HfParam| self.read(part, elements.clone());
            let pieces = parts.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            for row in 0..band.len() {
                for piece in &pieces {
                    piece.encode(row * share..(row + 1) * share, self.stored, self.out)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a whole matrix of the parameter, in its own element type: its columns become rows, and reading a
    /// few columns at a time would read every page of the file many times.
    fn transposed(&mut self, param: &HfParam, number: usize) -> Result<(), Unwritten> {
        let [.., rows, cols] = param.shape[..] else { return self.whole(param) };
        let size = rows * cols;
        let (dtype, bytes) = self.bytes(param, number * size..(number + 1) * size)?;
        let mut row = vec![0; rows * dtype.size()];
        for col in 0..cols {
            gather(dtype.size(), &bytes, col, cols, &mut row);
            WeightTensor::from_bytes([rows], dtype, &row).encode(0..rows, self.stored, self.out)?;
        }
        Ok(())
    }

    fn read(&self, param: &HfParam, elements: Range<usize>) -> Result<WeightTensor, HfError> {
        let shape = [elements.len()];
        let (dtype, bytes) = self.bytes(param, elements)?;
        Ok(WeightTensor::from_bytes(shape, dtype, &bytes))
    }

    /// Some values of a parameter in its own element type, as many as were asked for.
    fn bytes(&self, param: &HfParam, elements: Range<usize>) -> Result<(DType, Vec<u8>), HfError> {
        let HfParam { name, .. } = param;
        let (dtype, expected) = (self.weights.layout(name)?.dtype, elements.len());
        let bytes = self.weights.read_ranges(name, &[elements], dtype)?;
        if bytes.len() == expected * dtype.size() {
            return Ok((dtype, bytes));
        }
        let found = format!("{} bytes", bytes.len());
        Err(HfError::tensor(self.path, name, found, format!("{expected} values in {dtype}")))
    }
}

/// Rejects weights that are not exactly the parameters of the specification.
fn check(path: &Path, params: &[HfParam], layouts: &[TensorInfo]) -> Result<(), HfError> {
    let held: BTreeMap<&str, &TensorInfo> = layouts.iter().map(|l| (l.name.as_str(), l)).collect();
    for HfParam { name, shape, .. } in params {
        let found = match held.get(name.as_str()) {
            Some(layout) if layout.shape == *shape => continue,
            Some(layout) => format!("shape {:?}", layout.shape),
            None => "nothing".to_owned(),
        };
        let expected = format!("shape {shape:?}");
        return Err(HfError::tensor(path, name, found, expected));
    }
    let known: BTreeSet<&str> = params.iter().map(|p| p.name.as_str()).collect();
    match layouts.iter().find(|layout| !known.contains(layout.name.as_str())) {
        None => Ok(()),
        Some(TensorInfo { name, shape, .. }) => {
            let found = format!("shape {shape:?}");
            Err(HfError::tensor(path, name, found, "no such parameter"))
        }
    }
}
