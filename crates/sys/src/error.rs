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
    /// A symbolic link whose file does not exist.
    DeadLink {
        /// The path as given.
        path: PathBuf,
        /// What the link names.
        target: PathBuf,
    },
    /// The folder of a file to be written does not exist, or is a file.
    NoFolder {
        /// The path as given.
        path: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// A file to be written is marked as read-only.
    ReadOnly {
        /// The path as given.
        path: PathBuf,
    },
    /// A file is longer than anything of its kind.
    TooLarge {
        /// The path as given.
        path: PathBuf,
        /// The most bytes that are read.
        limit: u64,
    },
    /// The path names something else than a regular file, such as a folder.
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
            SysError::DeadLink { path, target } => {
                let (path, target) = (path.display(), target.display());
                Diagnostic::new(format!("{path}: a link to {target}, which does not exist"))
                    .fix("copy the file itself (cp -L), or correct the link")
            }
            SysError::NoFolder { path, folder } => {
                let shown = folder.display();
                let (found, fix) = match folder.exists() {
                    true => (format!("{shown} is a file, not a folder"), "name another folder"),
                    false => (format!("the folder {shown} does not exist"), "create it first"),
                };
                Diagnostic::new(format!("{}: {found}", path.display())).fix(fix)
            }
            SysError::ReadOnly { path } => {
                Diagnostic::new(format!("{}: this file is read-only", path.display()))
                    .fix("name another file, or allow writing to it (chmod u+w)")
            }
            SysError::TooLarge { path, limit } => {
                Diagnostic::new(format!("{}: more than {limit} bytes", path.display()))
                    .because("no file of this kind is that long")
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
                Diagnostic::new(format!("{}: failed while {doing}: {source}", path.display()))
                    .fix(remedy(source))
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
            io::ErrorKind::NotFound => match std::fs::read_link(&path) {
                Ok(target) => Self::DeadLink { path, target },
                Err(_) => Self::Missing { path },
            },
            _ => Self::File { path, doing, source },
        }
    }
}

/// What usually helps after an error of the system on a file.
pub fn remedy(error: &io::Error) -> &'static str {
    use io::ErrorKind::*;
    match error.kind() {
        NotFound => "check the spelling, or create it first",
        PermissionDenied | ReadOnlyFilesystem => "change its permissions, or choose another place",
        StorageFull | QuotaExceeded => "free some space, or choose another folder",
        FileTooLarge => "allow larger files (ulimit -f), or choose another disk",
        AlreadyExists | NotADirectory => {
            "move the file that is in the way, or choose another folder"
        }
        IsADirectory => "name a file, not a folder",
        InvalidData => "this is not text: copy or download it again",
        InvalidFilename => "choose a shorter name",
        OutOfMemory => "end other programs, or allow more memory (ulimit -v)",
        BrokenPipe => "keep the program that reads it running",
        _ if is(error, LOOP) => "a symbolic link leads back to itself: remove it",
        _ if is(error, TOO_MANY_OPEN) => "allow more open files (ulimit -n)",
        _ if is(error, NO_READER) => "start the program that reads this pipe first",
        _ => "check the disk and the path, then run the command again",
    }
}

fn is(error: &io::Error, codes: &[i32]) -> bool {
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(unix)]
const LOOP: &[i32] = &[libc::ELOOP];
#[cfg(unix)]
const TOO_MANY_OPEN: &[i32] = &[libc::EMFILE, libc::ENFILE];
#[cfg(unix)]
const NO_READER: &[i32] = &[libc::ENXIO];
#[cfg(not(unix))]
const LOOP: &[i32] = &[];
#[cfg(not(unix))]
const TOO_MANY_OPEN: &[i32] = &[];
#[cfg(not(unix))]
const NO_READER: &[i32] = &[];

fn here() -> String {
    std::env::current_dir()
        .map_or_else(|_| "the current folder".into(), |path| path.display().to_string())
}
