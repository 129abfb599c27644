//! The folder of a checkpoint: made under a temporary name, and renamed when it is whole.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use phalanx_error::{Error, Problem, Result};
use phalanx_sys::disk::sync_folder;
use phalanx_sys::write_atomic;

use crate::manifest::Manifest;
use crate::reader::Checkpoint;

/// The file that names the newest checkpoint.
pub const LATEST: &str = "latest";
/// The name of the manifest in a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The name of the configuration in a checkpoint.
pub const CONFIG: &str = "config.toml";
/// What the name of a checkpoint ends with while it is written.
const TEMPORARY: &str = ".tmp";
/// What the name of a checkpoint ends with while another one takes its place.
const REPLACED: &str = ".replaced";

/// The folder of a checkpoint that is being written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Folder {
    root: PathBuf,
    step: u64,
}

impl Folder {
    /// The checkpoint of a step, in the folder of a run's checkpoints.
    pub fn new(root: &Path, step: u64) -> Self {
        Self { root: root.to_path_buf(), step }
    }

    /// Where its files are written.
    pub fn temporary(&self) -> PathBuf {
        self.root.join(format!("{}{TEMPORARY}", name_of(self.step)))
    }

    /// Where it will be.
    pub fn path(&self) -> PathBuf {
        self.root.join(name_of(self.step))
    }

    /// Makes the folder for its files. What an earlier, unfinished attempt has left is removed.
    pub fn create(&self) -> Result<()> {
        let path = self.temporary();
        let told = |error: io::Error| Error::failed(Problem::io("cannot create", &path, &error));
        fs::create_dir_all(&self.root).map_err(told)?;
        if path.exists() {
            fs::remove_dir_all(&path).map_err(told)?;
        }
        fs::create_dir(&path).map_err(told)
    }

    /// Removes what was written, after an error.
    pub fn discard(&self) {
        // Nobody reads a folder of this name, so leaving it does no harm.
        let _ = fs::remove_dir_all(self.temporary());
    }

    /// Gives a checkpoint its name, once all its files are on the disk, and removes the oldest ones
    /// beyond `keep`. The run's configuration goes with it. Checkpoints of later steps are removed, too: the run went back to before them.
    pub fn commit(&self, manifest: &Manifest, config: &str, keep: usize) -> Result<PathBuf> {
        let (temporary, path) = (self.temporary(), self.path());
        let told = |error: io::Error| Error::failed(Problem::io("cannot write", &path, &error));
        write_atomic(&temporary.join(CONFIG), |out| out.write_all(config.as_bytes()))?;
        let text = serde_json::to_string_pretty(manifest).expect("a manifest is plain data");
        write_atomic(&temporary.join(MANIFEST), |out| out.write_all(text.as_bytes()))?;
        let replaced = self.root.join(format!("{}{REPLACED}", name_of(self.step)));
        if path.exists() {
            fs::rename(&path, &replaced).map_err(told)?;
        }
        fs::rename(&temporary, &path).map_err(told)?;
        sync_folder(&self.root).map_err(told)?;
        let name = format!("{}\n", name_of(self.step));
        write_atomic(&self.root.join(LATEST), |out| out.write_all(name.as_bytes()))?;
        prune(&self.root, self.step, keep);
        Ok(path)
    }
}

/// The newest checkpoint of a run that is whole: the one that `latest` names, or else the one of the
/// latest step. Unfinished and damaged ones are passed over.
pub fn newest(root: &Path) -> Option<PathBuf> {
    newest_and_damaged(root).0
}

/// The same, with what is wrong with those that were passed over.
pub fn newest_and_damaged(root: &Path) -> (Option<PathBuf>, Vec<Error>) {
    let named = fs::read_to_string(root.join(LATEST)).ok();
    let named = named.map(|name| root.join(name.trim_end())).filter(|path| step_of(path).is_some());
    if let Some(whole) = named.filter(|path| Checkpoint::open(path).is_ok()) {
        return (Some(whole), Vec::new());
    }
    let (mut all, mut damaged) = (list(root), Vec::new());
    all.sort();
    for (.., path) in all.into_iter().rev() {
        match Checkpoint::open(&path) {
            Ok(_) => return (Some(path), damaged),
            Err(error) => damaged.push(error),
        }
    }
    (None, damaged)
}

/// The last checkpoint of the same run before this one, whether it is whole or not.
pub(crate) fn before(path: &Path) -> Option<PathBuf> {
    let (root, step) = (path.parent()?, step_of(path)?);
    let earlier = list(root).into_iter().filter(|(other, own, _)| *own && *other < step);
    earlier.max().map(|(.., path)| path)
}

/// The checkpoints of a run: step, whether it is the one of that name, and path.
fn list(root: &Path) -> Vec<(u64, bool, PathBuf)> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let described = entries.filter_map(|path| {
        let name = path.file_name()?.to_str()?;
        let (plain, own) = match name.strip_suffix(REPLACED) {
            Some(plain) => (plain, false),
            None => (name, true),
        };
        Some((parse(plain)?, own, path.clone()))
    });
    described.collect()
}

/// Removes old checkpoints, and what runs that were killed have left of unfinished ones; what cannot be
/// removed stays.
fn prune(root: &Path, step: u64, keep: usize) {
    let mut all = list(root);
    all.sort();
    let mut kept = 0;
    for (other, own, path) in all.into_iter().rev() {
        let wanted = own && other <= step && kept < keep.max(1);
        kept += usize::from(wanted);
        if !wanted {
            let _ = fs::remove_dir_all(path);
        }
    }
    let entries = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in entries {
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(TEMPORARY));
        if name.and_then(parse).is_some_and(|other| other <= step) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

fn parse(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())?
}

fn step_of(path: &Path) -> Option<u64> {
    parse(path.file_name()?.to_str()?)
}
