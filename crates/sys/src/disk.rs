//! Files that are replaced atomically.
//!
//! The new content is written to a temporary file in the same folder, synced to the disk, and only
//! then renamed to the old file in one step. If anything fails, the old file stays and the
//! temporary file is removed; after a power failure the file has either the old or the new content,
//! never a mixture.
//!
//! Symbolic links are followed: the file that they name is replaced, and it keeps its permissions.
//! A device, a pipe or a terminal cannot be replaced: it is written to.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::SysError;
use crate::interrupt::{self, Writing};

/// Writes `path` with `fill`, which writes the content to the given writer.
///
/// The folder must exist.
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

/// Opens a file for writes that go past the system's cache; nothing where the file system has no such way.
/// Such a write begins and ends at blocks of the disk, and so does its memory.
pub fn open_past_cache(path: &Path) -> io::Result<Option<File>> {
    match system::open_past_cache(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        opened => opened,
    }
}

/// Where the content of `path` really goes: symbolic links are followed, also one to a file that does
/// not exist yet. Two paths with the same goal name the same file.
pub fn goal_of(path: &Path) -> Result<PathBuf, SysError> {
    let fail = |source| SysError::on_file(path, "looking for it", source);
    let mut goal = match fs::canonicalize(path) {
        Ok(goal) => return Ok(goal),
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_path_buf(),
        Err(error) => return Err(fail(error)),
    };
    // A loop of links was found above, so this ends.
    while let Ok(next) = fs::read_link(&goal) {
        goal = folder_of(&goal).join(next);
    }
    match (fs::canonicalize(folder_of(&goal)), goal.file_name()) {
        (Ok(folder), Some(name)) => Ok(folder.join(name)),
        _ => Ok(goal),
    }
}

/// New content of a file, written to the disk under a temporary name; dropping it removes the file.
///
/// Files that belong together are all staged before the first is put in place: if writing fails,
/// for example because the disk is full, every old file is unchanged.
#[derive(Debug)]
pub struct Staged {
    /// The path as given.
    path: PathBuf,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// In a temporary file, which will replace this one.
    OnDisk { goal: PathBuf, temporary: Temporary },
    /// In memory, for something that cannot be replaced. It is opened only at the end: a reader of a
    /// pipe would take opening and closing it for the end of the content.
    InMemory(Vec<u8>),
}

impl Staged {
    /// Writes the new content of `path` with `fill`.
    pub fn write(
        path: &Path,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<Self, SysError> {
        let fail = |doing| move |source| SysError::on_file(path, doing, source);
        let _writing = Writing::begin();
        let old = fs::metadata(path).ok();
        if let Some(old) = &old {
            may_be_written(path, old)?;
            if !old.is_file() || open_as_ours(old).is_some() {
                let mut content = Vec::new();
                fill(&mut content).map_err(fail("writing it"))?;
                return Ok(Self { path: path.to_path_buf(), content: Content::InMemory(content) });
            }
        }
        let goal = goal_of(path)?;
        let (temporary, file) = Temporary::beside(&goal, path)?;
        if let Some(old) = old {
            system::take_owner_and_mode(&file, &old).map_err(fail("giving it its permissions"))?;
        }
        let mut writer = BufWriter::with_capacity(1 << 20, Interruptible(file));
        fill(&mut writer).map_err(fail("writing it"))?;
        let file = writer.into_inner().map_err(|error| fail("writing it")(error.into_error()))?;
        file.0.sync_all().map_err(fail("syncing it to the disk"))?;
        Ok(Self { path: path.to_path_buf(), content: Content::OnDisk { goal, temporary } })
    }

    /// Gives the new content its name.
    pub fn put_in_place(self) -> Result<(), SysError> {
        let path = &*self.path;
        let fail = |doing| move |source| SysError::on_file(path, doing, source);
        match self.content {
            Content::OnDisk { goal, temporary } => {
                temporary.rename_to(&goal).map_err(fail("renaming the finished file to it"))?;
                sync_folder(folder_of(&goal)).map_err(fail("syncing its folder to the disk"))
            }
            Content::InMemory(bytes) => {
                let ours = fs::metadata(path).ok().and_then(|found| open_as_ours(&found));
                let mut file = match ours {
                    Some(stream) => stream,
                    None => system::open_stream(path).map_err(fail("opening it"))?,
                };
                file.write_all(&bytes).map_err(fail("writing it"))
            }
        }
    }
}

/// Refuses what cannot be written to, as opening it would.
fn may_be_written(path: &Path, old: &Metadata) -> Result<(), SysError> {
    if old.is_dir() {
        return Err(SysError::NotAFile { path: path.to_path_buf(), found: "a folder" });
    }
    // The system lets an administrator write to files that are marked as read-only.
    if old.is_file() && old.permissions().readonly() {
        return Err(SysError::ReadOnly { path: path.to_path_buf() });
    }
    system::access_for_writing(path).map_err(|source| SysError::on_file(path, "writing it", source))
}

/// Our standard output or standard error, if this is what was found. What else is printed there
/// would otherwise overwrite the content, or the other way round.
fn open_as_ours(found: &Metadata) -> Option<File> {
    let streams = [system::duplicate(&io::stdout()), system::duplicate(&io::stderr())];
    let same = |stream: &File| {
        stream.metadata().is_ok_and(|own| system::identity(&own) == system::identity(found))
    };
    streams.into_iter().flatten().find(same)
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
    /// A new file next to `goal`, which the user called `path`.
    fn beside(goal: &Path, path: &Path) -> Result<(Self, File), SysError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let fail = |source| SysError::on_file(path, "creating a temporary file next to it", source);
        let Some(name) = goal.file_name() else {
            return Err(fail(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the path has no file name",
            )));
        };
        let folder = folder_of(goal);
        if !folder.is_dir() {
            return Err(SysError::NoFolder { path: path.into(), folder: folder.into() });
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

/// Brings the names in a folder to the disk. Without this, a power failure could lose a new name although
/// the content is safe.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

#[cfg(unix)]
mod system {
    use std::ffi::CString;
    use std::fs::{File, Metadata, OpenOptions};
    use std::io;
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, fchown};
    use std::path::Path;
    use std::time::Duration;

    /// How often a pipe is tried, and the pause in between: the program that reads it may have been
    /// started just now.
    const TRIES: (usize, Duration) = (100, Duration::from_millis(20));

    pub(super) fn duplicate(stream: &impl AsFd) -> Option<File> {
        stream.as_fd().try_clone_to_owned().ok().map(File::from)
    }

    /// What tells a file from all others.
    pub(super) fn identity(file: &Metadata) -> (u64, u64) {
        (file.dev(), file.ino())
    }

    pub(super) fn access_for_writing(path: &Path) -> io::Result<()> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: the path ends with a zero.
        match unsafe { libc::access(path.as_ptr(), libc::W_OK) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Only an administrator may give a file to another user; everyone else owns it already, or
    /// becomes its owner.
    pub(super) fn take_owner_and_mode(file: &File, old: &Metadata) -> io::Result<()> {
        let _ = fchown(file, Some(old.uid()), Some(old.gid()));
        file.set_permissions(old.permissions())
    }

    /// Opens a device or pipe. A pipe that nobody reads is an error, because opening it would wait
    /// for a reader, perhaps forever.
    pub(super) fn open_stream(path: &Path) -> io::Result<File> {
        let mut open = OpenOptions::new();
        open.write(true);
        if !path.metadata()?.file_type().is_fifo() {
            return open.open(path);
        }
        let (mut left, pause) = TRIES;
        loop {
            match open.custom_flags(libc::O_NONBLOCK).open(path) {
                // While this one is open, an ordinary one opens at once if there is a reader.
                Ok(probe) => return open.custom_flags(0).open(path).inspect(|_| drop(probe)),
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) && left > 0 => {
                    left -= 1;
                    std::thread::sleep(pause);
                }
                Err(error) => return Err(error),
            }
        }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn open_past_cache(path: &Path) -> io::Result<Option<File>> {
        OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).map(Some)
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn open_past_cache(_: &Path) -> io::Result<Option<File>> {
        Ok(None)
    }

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
    use std::fs::{File, Metadata, OpenOptions};
    use std::io;
    use std::path::Path;

    pub(super) fn duplicate<T>(_: &T) -> Option<File> {
        None
    }

    pub(super) fn identity(_: &Metadata) -> (u64, u64) {
        (0, 0)
    }

    pub(super) fn access_for_writing(_: &Path) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn take_owner_and_mode(file: &File, old: &Metadata) -> io::Result<()> {
        file.set_permissions(old.permissions())
    }

    pub(super) fn open_stream(path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).open(path)
    }

    pub(super) fn open_past_cache(_: &Path) -> io::Result<Option<File>> {
        Ok(None)
    }

    pub(super) fn free_bytes(_: &Path) -> Option<u64> {
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
