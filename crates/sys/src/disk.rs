//! Files that are replaced atomically.
//!
//! The new content is written to a temporary file in the same folder, synced to the disk, and only
//! then renamed to the old file in one step. If anything fails, the old file stays and the
//! temporary file is removed; after a power failure the file has either the old or the new content,
//! never a mixture.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::SysError;
use crate::interrupt::{self, Writing};

/// Writes `path` with `fill`, which writes the content to the given writer.
///
/// The folder must exist. A symbolic link at `path` is replaced, not followed.
pub fn write_atomic(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), SysError> {
    Staged::write(path, fill)?.put_in_place()
}

/// Bytes that this process may still write to the disk of `folder`; `None` if the system does not
/// report it.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    system::free_bytes(folder)
}

/// New content of a file, written to the disk under a temporary name; dropping it removes the file.
///
/// Files that belong together are all staged before the first is put in place: if writing fails,
/// for example because the disk is full, every old file is unchanged.
#[derive(Debug)]
pub struct Staged {
    path: PathBuf,
    temporary: Temporary,
}

impl Staged {
    /// Writes the new content of `path` with `fill`.
    pub fn write(
        path: &Path,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<Self, SysError> {
        let fail = |doing| move |source| SysError::on_file(path, doing, source);
        let _writing = Writing::begin();
        let (temporary, file) = Temporary::beside(path)?;
        let mut writer = BufWriter::with_capacity(1 << 20, Interruptible(file));
        fill(&mut writer).map_err(fail("writing it"))?;
        let file = writer.into_inner().map_err(|error| fail("writing it")(error.into_error()))?;
        file.0.sync_all().map_err(fail("syncing it to the disk"))?;
        Ok(Self { path: path.to_path_buf(), temporary })
    }

    /// Gives the new content its name.
    pub fn put_in_place(self) -> Result<(), SysError> {
        let path = &*self.path;
        let fail = |doing| move |source| SysError::on_file(path, doing, source);
        self.temporary.rename_to(path).map_err(fail("renaming the finished file to it"))?;
        sync_folder(folder_of(path)).map_err(fail("syncing its folder to the disk"))
    }
}

/// A file that refuses writes once the user has interrupted twice.
struct Interruptible(File);

impl Write for Interruptible {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match interrupt::requested_twice() {
            true => Err(io::Error::other("interrupted: stop was requested twice")),
            false => self.0.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A file that removes itself unless it was given its final name, also when `fill` panics.
#[derive(Debug)]
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

impl Temporary {
    fn beside(path: &Path) -> Result<(Self, File), SysError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let fail = |source| SysError::on_file(path, "creating a temporary file next to it", source);
        let Some(name) = path.file_name() else {
            return Err(fail(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the path has no file name",
            )));
        };
        let folder = folder_of(path);
        if !folder.is_dir() {
            let message =
                format!("the folder {} does not exist; create it first", folder.display());
            return Err(fail(io::Error::other(message)));
        }
        if path.is_dir() {
            return Err(SysError::NotAFile { path: path.to_path_buf(), found: "a folder" });
        }
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Relaxed)));
        let temporary = folder.join(hidden);
        // `create_new`: a file of that name would belong to another program, and must not be
        // touched.
        let file =
            OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(fail)?;
        Ok((Self { path: temporary, renamed: false }, file))
    }

    fn rename_to(mut self, path: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, path)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // The original error is the one to report.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Without this, a power failure could lose the new name although the content is safe.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

#[cfg(unix)]
mod system {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    pub(super) fn free_bytes(folder: &Path) -> Option<u64> {
        let path = CString::new(folder.as_os_str().as_bytes()).ok()?;
        // SAFETY: the struct holds plain numbers, for which zeros are a value.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the path ends with a zero, and the struct is ours to fill.
        let answer = unsafe { libc::statvfs(path.as_ptr(), &mut stat) };
        #[allow(clippy::unnecessary_cast, reason = "the fields are narrower on some systems")]
        let bytes = (stat.f_bavail as u64).checked_mul(stat.f_frsize as u64);
        // A file system without blocks, such as /proc, is not a disk.
        bytes.filter(|_| answer == 0 && stat.f_blocks > 0)
    }
}

#[cfg(not(unix))]
mod system {
    pub(super) fn free_bytes(_: &std::path::Path) -> Option<u64> {
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_some_room_and_what_is_no_disk_has_none_to_tell_of() {
        assert!(free_bytes(Path::new("/tmp")).is_some());
        assert_eq!(free_bytes(Path::new("/proc")), None);
        assert_eq!(free_bytes(Path::new("/no/such/folder")), None);
    }
}
