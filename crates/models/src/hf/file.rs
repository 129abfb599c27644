//! One `safetensors` file: a JSON header that names the tensors, then their bytes.
//!
//! Opening reads and checks only the header. Of a tensor, only the bytes that are asked for are
//! read, so that a model larger than memory can be streamed. Plain reads are used rather than a
//! memory map: if a file shrinks or fails while it is read, that is then an error, not a signal
//! that ends the process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use phalanx_sys::{Staged, StandIn, open_regular};
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::error::HfError;
use super::tensor::Stored;

/// No writer makes longer headers; the limit prevents a damaged length from allocating all memory.
pub(super) const LONGEST_HEADER: u64 = 100_000_000;

/// An open file with a checked header.
pub(super) struct TensorFile {
    pub(super) path: PathBuf,
    file: File,
    data_start: u64,
    header: Metadata,
    /// Bytes of tensors that were read so far.
    read: AtomicU64,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, HfError> {
        let mut file = open_regular(path).map_err(HfError::Read)?;
        let length = file.metadata().map_err(|e| HfError::read(path, e))?.len();
        let short = |expected: &str| HfError::corrupt(path, format!("{length} bytes"), expected);
        refuse_stand_in(path, &file)?;
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
        let read = AtomicU64::new(0);
        Ok(TensorFile { path: path.into(), file, data_start, header, read })
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

    /// The element type of a tensor, which must be a float.
    pub(super) fn stored(&self, name: &str) -> Result<Stored, HfError> {
        let dtype = self.info(name)?.dtype;
        Stored::named(dtype).ok_or_else(|| {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            HfError::Elements { path, tensor, found: dtype.to_string() }
        })
    }

    /// Fills `room` with the bytes of a tensor as they are stored, from one of its bytes on.
    pub(super) fn read_at(&self, name: &str, from: usize, room: &mut [u8]) -> Result<(), HfError> {
        let (start, end) = self.info(name)?.data_offsets;
        if from.checked_add(room.len()).is_none_or(|last| last > end - start) {
            let found = format!("{} bytes", end - start);
            let expected = format!("{} from byte {from} on", room.len());
            return Err(HfError::tensor(&self.path, name, found, expected));
        }
        self.file
            .read_exact_at(room, self.data_start + (start + from) as u64)
            .map_err(|e| HfError::read(&self.path, e))?;
        self.read.fetch_add(room.len() as u64, Relaxed);
        Ok(())
    }

    /// Bytes of tensors that were read so far, by all threads.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read.load(Relaxed)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, HfError> {
        self.header
            .info(name)
            .ok_or_else(|| HfError::tensor(&self.path, name, "no such tensor", "one"))
    }
}

/// A pointer or a web page in place of the weights is named as what it is.
fn refuse_stand_in(path: &Path, file: &File) -> Result<(), HfError> {
    let mut first = [0; 64];
    let read = file.read_at(&mut first, 0).map_err(|e| HfError::read(path, e))?;
    match StandIn::of(&first[..read]) {
        Some(found) => Err(HfError::Read(found.error(path))),
        None => Ok(()),
    }
}

/// What the header of a new file says about one tensor.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) stored: Stored,
}

/// Why a tensor of a new file was not written.
pub(super) enum Unwritten {
    /// Writing to the disk failed.
    Disk(io::Error),
    /// Its values could not be read.
    Values(HfError),
}

impl From<io::Error> for Unwritten {
    fn from(error: io::Error) -> Self {
        Unwritten::Disk(error)
    }
}

impl From<HfError> for Unwritten {
    fn from(error: HfError) -> Self {
        Unwritten::Values(error)
    }
}

/// Writes a temporary file with the entries in the given order. `tensor` is called to write each
/// entry in turn, so that only one is in memory.
pub(super) fn stage(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    entries: &[Entry],
    mut tensor: impl FnMut(usize, &mut dyn Write) -> Result<(), Unwritten>,
) -> Result<Staged, HfError> {
    let header = header(metadata, entries);
    let mut missing = None;
    let fill = |out: &mut dyn Write| -> io::Result<()> {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for at in 0..entries.len() {
            tensor(at, out).map_err(|error| match error {
                Unwritten::Disk(error) => error,
                Unwritten::Values(error) => {
                    missing = Some(error);
                    io::Error::other("a tensor could not be read")
                }
            })?;
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
