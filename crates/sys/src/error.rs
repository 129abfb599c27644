//! Errors from the operating system.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use crate::{Diagnostic, StandIn};

/// A system facility failed; the message says which, on what, and what would work.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
    /// The file does not exist.
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The path names something that cannot be mapped, such as a folder.
    NotAFile {
        /// The path as given.
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
    /// Something else is there in place of the file that was meant.
    StandIn {
        /// The path as given.
        path: PathBuf,
        /// What is there.
        found: StandIn,
    },
    /// The disk, or the user's quota, has no room left.
    DiskFull {
        /// The file to write.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// Any other failure on a file.
    File {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The system's own error.
        source: io::Error,
    },
    /// A mapped file no longer has the length it was mapped with.
    Changed {
        /// The file.
        path: PathBuf,
        /// Its length when it was mapped.
        mapped: u64,
        /// Its length now.
        now: u64,
    },
    /// The system refused memory for an arena.
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
        /// The system's own error.
        source: io::Error,
    },
}

impl fmt::Display for SysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.diagnostic().fmt(f)
    }
}

impl SysError {
    /// The error in its parts.
    pub fn diagnostic(&self) -> Diagnostic {
        match self {
            SysError::Missing { path } => {
                Diagnostic::new(format!("{}: no such file", path.display()))
                    .because(format!("relative paths start at {}", here()))
                    .fix("check the path")
            }
            SysError::NotAFile { path, found } => {
                Diagnostic::new(format!("{}: not a regular file but {found}", path.display()))
                    .fix("give a regular file that contains the data")
            }
            SysError::StandIn { path, found } => {
                let (what, fix) = found.told();
                Diagnostic::new(format!("{} is {what}", path.display())).fix(fix)
            }
            SysError::DiskFull { path, doing, source } => {
                Diagnostic::new(format!("{}: disk full while {doing} ({source})", path.display()))
                    .because("an existing file is unchanged")
                    .fix("free some space, or choose another folder")
            }
            SysError::File { path, doing, source } => {
                let told =
                    Diagnostic::new(format!("{}: failed while {doing}: {source}", path.display()));
                match source.kind() {
                    io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                        told.fix("change its permissions, or choose another place")
                    }
                    _ => told,
                }
            }
            SysError::Changed { path, mapped, now } => Diagnostic::new(format!(
                "{}: {mapped} bytes were mapped but the file now has {now}",
                path.display()
            ))
            .fix("do not change a data file while it is being read"),
            SysError::OutOfMemory { bytes, source } => {
                Diagnostic::new(format!("cannot reserve {bytes} bytes of memory: {source}"))
                    .fix("use a smaller batch or model, more ranks, or recomputation")
            }
        }
    }

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
