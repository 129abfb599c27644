//! The header of a file: which entry lies where, in the safetensors format.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;

use phalanx_ir::DType;
use serde::{Deserialize, Serialize};

use crate::entry::SavedEntry;

/// Data begin at a multiple of this, so that they can be written past the system's cache.
const ALIGN: usize = 4096;
/// A header that is longer than this is not ours.
const MOST: u64 = 1 << 30;
/// The key of our entries among the metadata of a file.
const ENTRIES: &str = "phalanx.entries";

/// An entry and its place in the data of a file.
#[derive(Clone, PartialEq, Debug)]
pub struct PlacedEntry {
    /// What it is.
    pub entry: SavedEntry,
    /// Its element type.
    pub dtype: DType,
    /// Its first byte, counted from the start of the data.
    pub at: usize,
}

impl PlacedEntry {
    /// Its bytes, counted from the start of the data.
    pub fn bytes(&self) -> Range<usize> {
        self.at..self.at + self.entry.elements.len() * self.dtype.size()
    }
}

/// Which entries a file has.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Header {
    /// The entries, in the order of their places.
    pub placed: Vec<PlacedEntry>,
    /// Bytes of data, with what belongs to no entry.
    pub data: usize,
}

/// A tensor as the format describes it.
#[derive(Serialize, Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl Header {
    /// A header of these entries.
    pub fn new(mut placed: Vec<PlacedEntry>, data: usize) -> Self {
        placed.sort_by_key(|p| p.at);
        Self { placed, data }
    }

    /// As bytes. Bytes of data that belong to no entry are declared as padding, because the format
    /// has no holes.
    pub fn encode(&self) -> Vec<u8> {
        let mut tensors = serde_json::Map::new();
        let mut entries = BTreeMap::new();
        let mut at = 0;
        let padding = |range: Range<usize>, tensors: &mut serde_json::Map<_, _>| {
            if !range.is_empty() {
                tensors.insert(format!("padding.{}", range.start), tensor("U8", 1, &range));
            }
        };
        for placed in &self.placed {
            let PlacedEntry { entry, dtype, .. } = placed;
            padding(at..placed.at, &mut tensors);
            let name = format!("{}/{}@{}", entry.param, entry.kind, placed.at);
            at = placed.bytes().end;
            tensors.insert(name.clone(), tensor(name_of(*dtype), dtype.size(), &placed.bytes()));
            entries.insert(name, entry);
        }
        padding(at..self.data, &mut tensors);
        let entries = serde_json::to_string(&entries).expect("entries are plain data");
        tensors.insert("__metadata__".to_owned(), serde_json::json!({ ENTRIES: entries }));
        let mut json = serde_json::to_vec(&tensors).expect("a header is plain data");
        json.resize((8 + json.len()).next_multiple_of(ALIGN) - 8, b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        bytes
    }

    /// Reads the header at the start of a file; gives also where its data begin.
    pub fn read(file: &mut impl Read) -> io::Result<(Self, u64)> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > MOST {
            return Err(bad("its header has no sensible length"));
        }
        let mut json = Vec::new();
        file.take(length).read_to_end(&mut json)?;
        if json.len() as u64 != length {
            return Err(bad("it ends within its header"));
        }
        Self::parse(&json).map(|header| (header, 8 + length)).ok_or_else(|| {
            bad("its header is not the header of a file of a checkpoint, or it is damaged")
        })
    }

    fn parse(json: &[u8]) -> Option<Self> {
        let mut all: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(json).ok()?;
        let metadata = all.remove("__metadata__")?;
        let mut entries: BTreeMap<String, SavedEntry> =
            serde_json::from_str(metadata.get(ENTRIES)?.as_str()?).ok()?;
        let (mut placed, mut data) = (Vec::new(), 0);
        for (name, tensor) in all {
            let Tensor { dtype, data_offsets: [at, end], .. } =
                serde_json::from_value(tensor).ok()?;
            data = data.max(end);
            let Some(entry) = entries.remove(&name) else { continue };
            let dtype = DType::ALL.into_iter().find(|&known| name_of(known) == dtype)?;
            let range = &entry.elements;
            let sound = entry.block.is_sound()
                && range.start <= range.end
                && range.end <= entry.block.elements();
            let own = PlacedEntry { entry, dtype, at };
            if !sound || own.bytes() != (at..end) {
                return None;
            }
            placed.push(own);
        }
        entries.is_empty().then(|| Self::new(placed, data))
    }
}

fn tensor(dtype: &str, size: usize, bytes: &Range<usize>) -> serde_json::Value {
    let offsets = [bytes.start, bytes.end];
    let tensor =
        Tensor { dtype: dtype.to_owned(), shape: vec![bytes.len() / size], data_offsets: offsets };
    serde_json::to_value(tensor).expect("a tensor is plain data")
}

/// The name of an element type in the format.
fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
        DType::I32 => "I32",
        DType::U16 => "U16",
        DType::Bool => "BOOL",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::ParamBlock;

    fn placed(param: &str, elements: Range<usize>, at: usize) -> PlacedEntry {
        let entry = SavedEntry {
            param: param.to_owned(),
            kind: "master".to_owned(),
            version: 0,
            replica: 0,
            block: ParamBlock {
                shape: vec![10, 4],
                start: vec![2, 0],
                extent: vec![4, 4],
                dealt: 1,
            },
            elements,
        };
        PlacedEntry { entry, dtype: DType::F32, at }
    }

    #[test]
    fn a_header_is_read_back_and_aligns_the_data() {
        let header = Header::new(vec![placed("b", 3..16, 128), placed("a", 0..16, 0)], 256);
        let bytes = header.encode();
        assert_eq!(bytes.len() % ALIGN, 0);
        let (read, data) = Header::read(&mut &bytes[..]).unwrap();
        assert_eq!((read, data), (header, bytes.len() as u64));
    }

    #[test]
    fn damaged_headers_are_refused() {
        let header = Header::new(vec![placed("a", 0..16, 0)], 64);
        let bytes = header.encode();
        for end in [0, 7, 9, 300] {
            assert!(Header::read(&mut &bytes[..end]).is_err(), "{end}");
        }
        let mut long = bytes.clone();
        long[7] = 0xff;
        assert!(Header::read(&mut &long[..]).is_err());
        let text = String::from_utf8(bytes[8..].to_vec()).unwrap();
        for (from, to) in [
            ("\"data_offsets\":[0,64]", "\"data_offsets\":[0,60]"),
            ("\\\"end\\\":16", "\\\"end\\\":17"),
            ("F32", "F33"),
            ("phalanx.entries", "phalanx.nothing"),
        ] {
            assert!(text.contains(from), "{from}");
            let changed = text.replace(from, to);
            let mut file = (changed.len() as u64).to_le_bytes().to_vec();
            file.extend(changed.into_bytes());
            assert!(Header::read(&mut &file[..]).is_err(), "{from}");
        }
    }
}
