//! Reading files that people name: only regular ones, and not without end.
//!
//! A pipe would make the program wait, perhaps forever, and a device may never end. Where a pipe is
//! meant, as in `<(command)` or `/dev/stdin`, [`read_stream`] reads it once.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::SysError;

/// Opens a regular file for reading.
pub fn open_regular(path: &Path) -> Result<File, SysError> {
    let fail = |doing| move |source| SysError::on_file(path, doing, source);
    // Asked before opening, because opening a pipe would wait for its other end.
    let kind = std::fs::metadata(path).map_err(fail("looking for it"))?.file_type();
    if !kind.is_file() {
        let found = if kind.is_dir() { "a folder" } else { "a device, pipe or socket" };
        return Err(SysError::NotAFile { path: path.to_path_buf(), found });
    }
    File::open(path).map_err(fail("opening it"))
}

/// The content of a regular file of at most `limit` bytes.
pub fn read_regular(path: &Path, limit: u64) -> Result<Vec<u8>, SysError> {
    all(open_regular(path)?, path, limit)
}

/// The same as text.
pub fn read_text(path: &Path, limit: u64) -> Result<String, SysError> {
    let not_text = |error: std::string::FromUtf8Error| {
        let source = io::Error::new(io::ErrorKind::InvalidData, error.utf8_error());
        SysError::on_file(path, "reading it", source)
    };
    String::from_utf8(read_regular(path, limit)?).map_err(not_text)
}

/// The same for a file that may also be a pipe which this process was given: standard input, as
/// `/dev/stdin` or `-`, or an open file, as a shell's `<(command)`. What was read is gone, so read it
/// once.
pub fn read_stream(path: &Path, limit: u64) -> Result<Vec<u8>, SysError> {
    if path == Path::new("-") || path == Path::new("/dev/stdin") {
        return all(io::stdin().lock(), path, limit);
    }
    let given = ["/dev/fd", "/proc/self/fd"].iter().any(|folder| path.starts_with(folder));
    match given && !path.is_dir() {
        true => {
            let file = File::open(path);
            let file = file.map_err(|source| SysError::on_file(path, "opening it", source))?;
            all(file, path, limit)
        }
        false => read_regular(path, limit),
    }
}

/// Everything up to the end, which must come within `limit` bytes.
fn all(from: impl Read, path: &Path, limit: u64) -> Result<Vec<u8>, SysError> {
    let mut bytes = Vec::new();
    let read = from.take(limit + 1).read_to_end(&mut bytes);
    read.map_err(|source| SysError::on_file(path, "reading it", source))?;
    match bytes.len() as u64 > limit {
        true => Err(SysError::TooLarge { path: path.to_path_buf(), limit }),
        false => Ok(bytes),
    }
}
