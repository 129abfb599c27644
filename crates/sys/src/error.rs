//! What can go wrong between this program and the operating system.

use std::io;
use std::path::{Path, PathBuf};

/// A system facility failed; the message says which, on what, and what would work.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
    /// The file does not exist.
    #[error("{path}: no such file; check the path, relative paths start at {base}", path = path.display(), base = here())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The path names something that cannot be mapped, such as a folder.
    #[error("{path}: not a regular file but {found}; name a file that holds the data itself", path = path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
    /// The disk, or the user's share of it, has no room left.
    #[error("{path}: disk full while {doing} ({source}); the file that was there before is unchanged; free some space, or choose another folder", path = path.display())]
    DiskFull {
        /// The file that was to be written.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// Any other failure on a file.
    #[error("{path}: failed while {doing}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// A mapped file no longer has the length it was mapped with.
    #[error("{path}: {mapped} bytes were mapped but the file now has {now}; do not change a data file while it is being read", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its length when it was mapped.
        mapped: u64,
        /// Its length now.
        now: u64,
    },
    /// The system refused memory for an arena.
    #[error(
        "cannot reserve {bytes} bytes of memory: {source}; a smaller batch or model, more ranks, or recomputation needs less"
    )]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
        /// The system's own error.
        source: io::Error,
    },
}

impl SysError {
    /// Sorts an input or output error on `path` into the case a user can act on.
    pub fn on_file(path: &Path, doing: &'static str, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path, doing, source }
            }
            _ => Self::File { path, doing, source },
        }
    }
}

fn here() -> String {
    std::env::current_dir()
        .map_or_else(|_| "the current folder".into(), |path| path.display().to_string())
}
