//! One `safetensors` file: a JSON header that names the tensors, then their bytes.
//!
//! Opening reads and checks the header alone; tensors are read one by one when asked for, so that a
//! model larger than memory can be streamed. Plain reads are used rather than a memory map: a file
//! that shrinks or fails under the reader is then an error, not a signal that ends the process.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use phalanx_sys::Staged;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::error::HfError;
use super::tensor::{Stored, Tensor, decode};

/// Headers beyond this are not written by anybody; the limit keeps a damaged length from asking for
/// all memory.
const LONGEST_HEADER: u64 = 100_000_000;

/// An open file with a checked header.
pub(super) struct TensorFile {
    pub(super) path: PathBuf,
    file: File,
    data_start: u64,
    header: Metadata,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, HfError> {
        let mut file = File::open(path).map_err(|e| HfError::read(path, e))?;
        let length = file.metadata().map_err(|e| HfError::read(path, e))?.len();
        let short = |expected: &str| HfError::corrupt(path, format!("{length} bytes"), expected);
        if length < 8 {
            return Err(short("at least the 8 bytes of a header's length"));
        }
        let mut prefix = [0; 8];
        let read_error = |e| HfError::read(path, e);
        file.read_exact(&mut prefix).map_err(read_error)?;
        let header_length = u64::from_le_bytes(prefix);
        if header_length > LONGEST_HEADER {
            let found = format!("a header of {header_length} bytes");
            return Err(HfError::corrupt(path, found, "a safetensors file"));
        }
        let data_start = 8 + header_length;
        if length < data_start {
            return Err(short(&format!("a header that ends at byte {data_start}")));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(read_error)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|e| HfError::corrupt(path, e.to_string(), "a safetensors header"))?;
        let expected = data_start.saturating_add(header.data_len() as u64);
        if length != expected {
            return Err(short(&format!("{expected} bytes, as its header says")));
        }
        Ok(TensorFile { path: path.into(), file, data_start, header })
    }

    /// The names of its tensors, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names = self.header.offset_keys();
        names.sort();
        names
    }

    /// The text entries of its header.
    pub(super) fn metadata(&self) -> BTreeMap<String, String> {
        let entries = self.header.metadata().iter().flatten();
        entries.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.header.info(name).map(|info| info.shape.as_slice())
    }

    /// Reads one tensor as floats.
    pub(super) fn read(&self, name: &str) -> Result<Tensor, HfError> {
        let info = self.info(name)?;
        let Some(values) = decode(info.dtype, &self.bytes(name)?) else {
            let found = format!("elements of type {}", info.dtype);
            let expected = "F32, F64, BF16 or F16";
            return Err(HfError::tensor(&self.path, name, found, expected));
        };
        Ok(Tensor { shape: info.shape.clone(), values })
    }

    /// The bytes of one tensor as they are stored.
    pub(super) fn bytes(&self, name: &str) -> Result<Vec<u8>, HfError> {
        let (start, end) = self.info(name)?.data_offsets;
        let mut bytes = vec![0; end - start];
        self.file
            .read_exact_at(&mut bytes, self.data_start + start as u64)
            .map_err(|e| HfError::read(&self.path, e))?;
        Ok(bytes)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, HfError> {
        self.header
            .info(name)
            .ok_or_else(|| HfError::tensor(&self.path, name, "no such tensor", "one"))
    }
}

/// What the header of a new file says about one tensor.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) stored: Stored,
}

/// Stages a file: the entries in the order given, each tensor asked for once, when its turn comes,
/// so that converted copies never exist all at once.
pub(super) fn stage<'a>(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    entries: &[Entry],
    mut tensor: impl FnMut(usize) -> Result<Cow<'a, Tensor>, HfError>,
) -> Result<Staged, HfError> {
    let header = header(metadata, entries);
    let mut missing = None;
    let fill = |out: &mut dyn Write| -> io::Result<()> {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (i, entry) in entries.iter().enumerate() {
            let tensor = tensor(i).map_err(|error| {
                missing = Some(error);
                io::Error::other("a tensor can't be had")
            })?;
            out.write_all(&tensor.encode(entry.stored))?;
        }
        Ok(())
    };
    let staged = Staged::write(path, fill);
    match missing {
        Some(error) => Err(error),
        None => staged.map_err(HfError::Write),
    }
}

/// The header, padded with spaces so that the data starts at a multiple of eight bytes.
fn header(metadata: &BTreeMap<String, String>, entries: &[Entry]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".to_owned(), json!(metadata));
    let mut offset = 0;
    for entry in entries {
        let end = offset + entry.shape.iter().product::<usize>() * entry.stored.size();
        let info = json!({
            "dtype": entry.stored.header_name(),
            "shape": entry.shape,
            "data_offsets": [offset, end],
        });
        map.insert(entry.name.clone(), info);
        offset = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    text
}
