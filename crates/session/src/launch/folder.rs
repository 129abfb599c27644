//! A folder for the sockets of a job.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use phalanx_error::{Error, Problem, Result};

/// A folder for sockets that only this user can enter; it is removed at the end. Its launcher keeps a
/// lock on it, so the next launcher can tell one whose launcher was killed, and removes it.
pub(super) struct Folder {
    path: PathBuf,
    /// Held open for its lock.
    _lock: Option<File>,
}

/// How the names of such folders, and of sockets in them, begin.
const FOLDER: &str = "phalanx-";
const SOCKET: &str = "meet-";

impl Folder {
    pub(super) fn new() -> Result<Self> {
        // The path of a socket has at most 107 bytes.
        let temporary = std::env::temp_dir();
        let short = temporary.as_os_str().len() < 60;
        Self::within(if short { &temporary } else { Path::new("/tmp") })
    }

    fn within(root: &Path) -> Result<Self> {
        for number in 0.. {
            let path = root.join(format!("{FOLDER}{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {
                    let lock = File::open(&path).ok().filter(|folder| folder.try_lock().is_ok());
                    remove_abandoned(root, &path);
                    return Ok(Self { path, _lock: lock });
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let problem = Problem::io("cannot create the folder", &path, &error);
                    return Err(Error::refused(
                        problem.fix("set TMPDIR to a folder that can be written"),
                    ));
                }
            }
        }
        unreachable!("numbers do not end")
    }

    /// Where the ranks of an epoch meet: nobody of another epoch comes there.
    pub(super) fn meet(&self, epoch: u64) -> PathBuf {
        self.path.join(format!("{SOCKET}{epoch}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes folders of this user that no launcher has locked, if there is nothing but sockets in them.
fn remove_abandoned(root: &Path, own: &Path) {
    let Ok(user) = fs::metadata(own).map(|own| own.uid()) else { return };
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let path = entry.path();
        let named = entry.file_name().to_string_lossy().starts_with(FOLDER);
        let ours = || fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir() && m.uid() == user);
        if !named || path == own || !ours() {
            continue;
        }
        let Some(folder) = File::open(&path).ok().filter(|folder| folder.try_lock().is_ok()) else {
            continue;
        };
        for socket in fs::read_dir(&path).into_iter().flatten().flatten() {
            let named = socket.file_name().to_string_lossy().starts_with(SOCKET);
            if named && socket.file_type().is_ok_and(|kind| kind.is_socket()) {
                let _ = fs::remove_file(socket.path());
            }
        }
        // What holds anything else stays.
        let _ = fs::remove_dir(&path);
        drop(folder);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_folder_that_a_killed_launcher_left_is_removed_and_others_stay() {
        let root = std::env::temp_dir().join(format!("folders-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let lives = Folder::within(&root).unwrap();
        let [abandoned, other, foreign] =
            ["phalanx-1-0", "phalanx-1-1", "other"].map(|name| root.join(name));
        for folder in [&abandoned, &other, &foreign] {
            fs::create_dir(folder).unwrap();
            drop(UnixListener::bind(folder.join("meet-0")).unwrap());
        }
        fs::write(other.join("notes"), "mine").unwrap();
        let next = Folder::within(&root).unwrap();
        assert!(!abandoned.exists());
        assert!(lives.path.exists() && next.path.exists());
        assert!(other.join("notes").exists() && foreign.join("meet-0").exists());
        drop((lives, next));
        fs::remove_dir_all(&root).unwrap();
    }
}
