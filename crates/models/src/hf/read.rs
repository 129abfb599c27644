//! Reading a Hugging Face folder.
//!
//! [`ModelFolder::open`] reads the configuration and the headers of all weight files and matches every
//! tensor with a parameter of the specification; after that, reading a parameter fails only where
//! the disk does.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use phalanx_ir::DType;
use phalanx_sys::read_text;
use serde_json::Value;

use super::config::read_config;
use super::error::{ABSENT, HfError};
use super::file::{LONGEST_HEADER, TensorFile};
use super::names::{self, HF_HEAD, HfParam, Storage};
use super::spec::ModelSpec;
use super::tensor::decode;
use super::view::View;
use super::weights::{TensorInfo, Weights};

/// An open model folder whose files have been checked against its configuration.
pub struct ModelFolder {
    spec: ModelSpec,
    files: Vec<TensorFile>,
    /// The tensors of each parameter, in order.
    params: BTreeMap<String, Vec<Located>>,
}

/// A parameter, and the file and tensor that hold it or one of its matrices.
struct Located {
    param: HfParam,
    file: usize,
    stored_name: String,
    dtype: DType,
}

impl ModelFolder {
    /// Opens a folder with `config.json` and `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names.
    pub fn open(dir: &Path) -> Result<Self, HfError> {
        let spec = read_config(&dir.join("config.json"))?;
        let (main, files) = open_files(dir)?;
        let stored = stored_tensors(&files);
        let mut unused: BTreeSet<&str> = stored.keys().map(String::as_str).collect();
        let mut params: BTreeMap<String, Vec<Located>> = BTreeMap::new();
        let mut missing = Vec::new();
        for param in names::params(&spec) {
            let bare = names::without_prefix(&param.hf_name);
            let found =
                stored.get_key_value(param.hf_name.as_str()).or_else(|| stored.get_key_value(bare));
            let Some((name, &file)) = found else {
                missing.push(param);
                continue;
            };
            check_shape(&files[file], name, &param)?;
            unused.remove(name.as_str());
            let dtype = files[file].stored(name)?.dtype();
            let located = Located { file, stored_name: name.clone(), dtype, param };
            params.entry(located.param.name.clone()).or_default().push(located);
        }
        let source = ModelFolder { spec, files, params };
        source.refuse_missing(&main, &missing)?;
        source.refuse_extra(&unused, &stored)?;
        Ok(source)
    }

    /// The sizes and settings of the model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Its parameters, sorted by our names.
    pub fn params(&self) -> impl Iterator<Item = &HfParam> {
        self.params.values().flatten().map(|located| &located.param)
    }

    /// Bytes of tensors that were read so far, by all threads.
    pub fn bytes_read(&self) -> u64 {
        self.files.iter().map(TensorFile::bytes_read).sum()
    }

    fn located(&self, name: &str) -> Result<&[Located], HfError> {
        self.params.get(name).map(Vec::as_slice).ok_or_else(|| {
            let path = &self.files[0].path;
            HfError::tensor(path, name, "no such parameter", "one of the model's")
        })
    }

    /// A tensor as a parameter of this shape.
    fn view<'a>(&'a self, part: &'a Located, storage: Storage, shape: &'a [usize]) -> View<'a> {
        View { file: &self.files[part.file], tensor: &part.stored_name, storage, shape }
    }

    fn refuse_missing(&self, main: &Path, missing: &[HfParam]) -> Result<(), HfError> {
        let Some(first) = missing.first() else {
            return Ok(());
        };
        let found = match missing.len() {
            1 => ABSENT.to_owned(),
            n => format!("{ABSENT}, and {} more are", n - 1),
        };
        let expected = format!("shape {:?}", first.hf_shape());
        Err(HfError::tensor(main, &first.hf_name, found, expected))
    }

    fn refuse_extra(
        &self,
        unused: &BTreeSet<&str>,
        stored: &BTreeMap<String, usize>,
    ) -> Result<(), HfError> {
        let copies = names::copies_of_embedding(&self.spec);
        for &name in unused {
            let file = &self.files[stored[name]];
            if names::is_known_buffer(&self.spec, name) {
                continue;
            }
            if copies.contains(&name) {
                self.check_copy(file, name)?;
                continue;
            }
            let found = format!("shape {:?}", file.shape(name).unwrap_or_default());
            let expected = "no such tensor: the model of config.json does not have it";
            return Err(HfError::tensor(&file.path, name, found, expected));
        }
        Ok(())
    }

    /// Some writers store a tied head, or a shared table, once more. That is harmless as long as it is the embedding.
    fn check_copy(&self, file: &TensorFile, name: &str) -> Result<(), HfError> {
        let embed = &self.params["embed"][0];
        let same_shape = file.shape(name) == Some(&embed.param.shape);
        let embedding = (&self.files[embed.file], embed.stored_name.as_str());
        if same_shape && same_values((file, name), embedding, &embed.param.shape)? {
            return Ok(());
        }
        let found = format!("a tensor that differs from `{}`", embed.stored_name);
        let expected = match name {
            HF_HEAD => "the same values, or \"tie_word_embeddings\": false in config.json",
            _ => "the same values: one table of words serves all",
        };
        Err(HfError::tensor(&file.path, name, found, expected))
    }
}

impl Weights for ModelFolder {
    fn layouts(&self) -> Vec<TensorInfo> {
        self.params.values().map(|parts| parts[0].layout()).collect()
    }

    fn layout(&self, name: &str) -> Result<TensorInfo, HfError> {
        Ok(self.located(name)?[0].layout())
    }

    fn read_ranges(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Vec<u8>, HfError> {
        let parts = self.located(name)?;
        let shape = &parts[0].param.shape;
        if !matches!(parts[0].param.storage, Storage::Matrix { .. }) {
            return self.view(&parts[0], parts[0].param.storage, shape).read(ranges, dtype);
        }
        let mut out = Vec::new();
        for (number, ranges) in by_matrix(ranges, shape[1..].iter().product()) {
            let part = parts.get(number).ok_or_else(|| {
                let (path, found) = (&self.files[0].path, format!("{} matrices", parts.len()));
                HfError::tensor(path, name, found, format!("matrix {number}"))
            })?;
            out.extend(self.view(part, Storage::Transposed, &shape[1..]).read(&ranges, dtype)?);
        }
        Ok(out)
    }
}

/// The same elements as ranges of each matrix, by its number; neighbours in one matrix are together.
fn by_matrix(ranges: &[Range<usize>], size: usize) -> Vec<(usize, Vec<Range<usize>>)> {
    let mut out: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
    for range in ranges.iter().filter(|_| size > 0) {
        let mut from = range.start;
        while from < range.end {
            let (number, end) = (from / size, range.end.min((from / size + 1) * size));
            let own = from - number * size..end - number * size;
            match out.last_mut().filter(|(last, _)| *last == number) {
                Some((_, pieces)) => pieces.push(own),
                None => out.push((number, vec![own])),
            }
            from = end;
        }
    }
    out
}

impl Located {
    fn layout(&self) -> TensorInfo {
        let HfParam { name, shape, .. } = &self.param;
        TensorInfo { name: name.clone(), shape: shape.clone(), dtype: self.dtype }
    }
}

/// Whether two tensors of the same shape hold the same values. Reads them in small pieces.
fn same_values(
    (a, a_name): (&TensorFile, &str),
    (b, b_name): (&TensorFile, &str),
    shape: &[usize],
) -> Result<bool, HfError> {
    const PIECE: usize = 1 << 16;
    let (a_stored, b_stored) = (a.stored(a_name)?, b.stored(b_name)?);
    let elements: usize = shape.iter().product();
    for from in (0..elements).step_by(PIECE) {
        let len = PIECE.min(elements - from);
        let (mut ours, mut theirs) =
            (vec![0; len * a_stored.size()], vec![0; len * b_stored.size()]);
        a.read_at(a_name, from * a_stored.size(), &mut ours)?;
        b.read_at(b_name, from * b_stored.size(), &mut theirs)?;
        if decode(a_stored, &ours) != decode(b_stored, &theirs) {
            return Ok(false);
        }
    }
    Ok(true)
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The weight files of a folder, and the one to name in errors if a tensor is in none of them.
fn open_files(dir: &Path) -> Result<(PathBuf, Vec<TensorFile>), HfError> {
    let single = dir.join(SINGLE);
    // A link to nothing is not a missing file: its error names what it links to.
    if single.exists() || single.is_symlink() {
        return Ok((single.clone(), vec![TensorFile::open(&single)?]));
    }
    let index = dir.join(INDEX);
    if index.exists() || index.is_symlink() {
        let files = open_shards(dir, &index)?;
        return Ok((index, files));
    }
    let listing = std::fs::read_dir(dir).map_err(|e| HfError::read(dir, e))?;
    let mut found: Vec<String> = listing
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    found.sort();
    Err(HfError::NoWeights { dir: dir.into(), found: found.join(", ") })
}

/// Opens the shards of an index and checks that index and shards name the same tensors.
fn open_shards(dir: &Path, index: &Path) -> Result<Vec<TensorFile>, HfError> {
    let shards = read_index(index)?;
    // A missing shard is reported first: it explains the other problems.
    if let Some((shard, tensors)) = shards.iter().find(|(name, _)| !dir.join(name).exists()) {
        let tensor = tensors.first().map_or("", String::as_str);
        let found = format!("the file name `{shard}`, which does not exist");
        return Err(HfError::tensor(index, tensor, found, "a file of this folder"));
    }
    let mut files = Vec::new();
    for (shard, tensors) in shards {
        let path = dir.join(&shard);
        let file = TensorFile::open(&path)?;
        let held: BTreeSet<String> = file.names().into_iter().collect();
        if let Some(absent) = tensors.difference(&held).next() {
            let expected = format!("a tensor, as {INDEX} says");
            return Err(HfError::tensor(&path, absent, "nothing", expected));
        }
        if let Some(unlisted) = held.difference(&tensors).next() {
            let found = format!("a tensor that {INDEX} does not place in this file");
            return Err(HfError::tensor(&path, unlisted, found, "only listed tensors"));
        }
        files.push(file);
    }
    Ok(files)
}

/// The tensors of each shard. Shard names are plain names of files in the same folder.
fn read_index(path: &Path) -> Result<BTreeMap<String, BTreeSet<String>>, HfError> {
    let text = read_text(path, LONGEST_HEADER).map_err(HfError::Read)?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|e| HfError::corrupt(path, e.to_string(), "a JSON object"))?;
    let Some(entries) = value.get("weight_map").and_then(Value::as_object) else {
        return Err(HfError::key(path, "weight_map", "nothing", "an object of tensor: file"));
    };
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, shard) in entries {
        let name = shard.as_str().filter(|s| Path::new(s).file_name().is_some_and(|n| n == *s));
        let Some(name) = name else {
            let key = format!("weight_map.{tensor}");
            return Err(HfError::key(path, &key, shard.to_string(), "the name of a file"));
        };
        let tensors = shards.entry(name.to_owned()).or_default();
        tensors.insert(tensor.clone());
    }
    if shards.is_empty() {
        return Err(HfError::key(path, "weight_map", "no tensors", "the model's tensors"));
    }
    Ok(shards)
}

/// The file of every stored tensor.
fn stored_tensors(files: &[TensorFile]) -> BTreeMap<String, usize> {
    let files = files.iter().enumerate();
    files.flat_map(|(i, file)| file.names().into_iter().map(move |name| (name, i))).collect()
}

fn check_shape(file: &TensorFile, name: &str, param: &HfParam) -> Result<(), HfError> {
    let expected = param.hf_shape();
    let found = file.shape(name).unwrap_or_default();
    if found == expected {
        return Ok(());
    }
    Err(HfError::tensor(
        &file.path,
        name,
        format!("shape {found:?}"),
        format!("shape {expected:?}, as config.json says"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_where_matrices_end() {
        let all = |range: Range<usize>| vec![range];
        assert_eq!(
            by_matrix(&[2..3, 4..13], 6),
            [(0, vec![2..3, 4..6]), (1, all(0..6)), (2, all(0..1))]
        );
        assert_eq!(by_matrix(&[7..8, 0..1], 6), [(1, all(1..2)), (0, all(0..1))]);
        assert_eq!(by_matrix(&[3..3, 9..9], 6), []);
    }
}
