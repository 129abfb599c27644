//! Writing one file of a checkpoint.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use phalanx_error::{Error, Problem, Result};

use crate::header::Header;
use crate::manifest::{FileSummary, Piece};
use crate::past_cache::past_cache;
use crate::storage::FileSink;

/// Bytes that have one hash.
pub const PIECE_BYTES: usize = 16 << 20;

/// A file that is being written, in any order; what is written is hashed on the way.
#[derive(Debug)]
pub struct FileWriter {
    path: PathBuf,
    name: String,
    sink: Box<dyn FileSink>,
    /// Where data begin, and where they end.
    data: [u64; 2],
    pieces: Mutex<Vec<Piece>>,
}

impl FileWriter {
    /// Creates a file in a folder and writes its header.
    pub fn create(folder: &Path, name: &str, header: &Header) -> Result<Self> {
        let path = folder.join(name);
        let told = |error: io::Error| Error::failed(Problem::io("cannot write", &path, &error));
        let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(told)?;
        let encoded = header.encode();
        let bytes = encoded.len() + header.data;
        file.set_len(bytes as u64).map_err(told)?;
        let sink = past_cache(file, &path, bytes).map_err(told)?;
        Self::over(&path, name, header, &encoded, sink)
    }

    /// A file that lies elsewhere: `path` says where, for people, and `encoded` is its header.
    pub fn over(
        path: &Path,
        name: &str,
        header: &Header,
        encoded: &[u8],
        sink: Box<dyn FileSink>,
    ) -> Result<Self> {
        let told = |error: io::Error| Error::failed(Problem::io("cannot write", path, &error));
        sink.write_all_at(encoded, 0).map_err(told)?;
        let start = encoded.len() as u64;
        let data = [start, start + header.data as u64];
        let pieces = Mutex::new(vec![Piece::of(0, encoded)]);
        Ok(Self { path: path.to_path_buf(), name: name.to_owned(), sink, data, pieces })
    }

    /// Writes bytes at a place in the data.
    pub fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let [start, end] = self.data;
        let mut at = start + at;
        if at + bytes.len() as u64 > end {
            return Err(io::Error::other("these bytes lie behind the end of the data"));
        }
        for piece in bytes.chunks(PIECE_BYTES) {
            self.sink.write_all_at(piece, at)?;
            let hashed = Piece::of(at, piece);
            self.pieces.lock().unwrap_or_else(PoisonError::into_inner).push(hashed);
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the file is on the disk. Fails if some of it was not written.
    pub fn finish(&self) -> Result<FileSummary> {
        let told =
            |error: io::Error| Error::failed(Problem::io("cannot write", &self.path, &error));
        self.sink.finish().map_err(told)?;
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner).clone();
        pieces.sort_by_key(|piece| piece.at);
        fill_gaps(&mut pieces, self.data[1]);
        let summary = FileSummary { name: self.name.clone(), bytes: self.data[1], pieces };
        match summary.gap() {
            None => Ok(summary),
            Some(at) => Err(told(io::Error::other(format!("byte {at} was not written once")))),
        }
    }
}

/// Between buffers there are a few bytes that nothing writes; a new file has zeros there.
fn fill_gaps(pieces: &mut Vec<Piece>, end: u64) {
    let (mut at, mut gaps) = (0, Vec::new());
    let ends = pieces.iter().map(|piece| (piece.at, piece.bytes)).chain([(end, 0)]);
    for (start, bytes) in ends {
        if (1..=MOST_GAP).contains(&start.saturating_sub(at)) {
            gaps.push(Piece::of(at, &vec![0; (start - at) as usize]));
        }
        at = start + bytes;
    }
    pieces.extend(gaps);
    pieces.sort_by_key(|piece| piece.at);
}

/// Buffers are aligned to less than this.
const MOST_GAP: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_must_be_written_once_everywhere() {
        let dir = tempfile::tempdir().unwrap();
        let header = Header { placed: Vec::new(), data: 20_000 };
        let write = |name: &str, writes: &[(u64, usize)]| {
            let writer = FileWriter::create(dir.path(), name, &header).unwrap();
            for &(at, bytes) in writes {
                writer.write(at, &vec![7; bytes]).unwrap();
            }
            writer.finish()
        };
        let whole = write("a", &[(10_000, 9_990), (0, 9_990)]).unwrap();
        assert_eq!(whole.gap(), None);
        assert_eq!(whole.pieces.iter().map(|p| p.bytes).sum::<u64>(), whole.bytes);
        assert!(write("b", &[(0, 10_000)]).unwrap_err().to_string().contains("not written once"));
        assert!(write("c", &[(0, 20_000), (0, 8)]).is_err());
        let writer = FileWriter::create(dir.path(), "d", &header).unwrap();
        assert!(writer.write(19_999, &[1, 2]).is_err());
    }
}
