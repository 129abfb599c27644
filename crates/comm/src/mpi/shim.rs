//! The shim as a file: built once for each MPI library, and kept.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::CommError;

/// The shim's text.
const SOURCE: &str = include_str!("../../../../tools/mpi/shim.c");

/// The variable that names a shim which was built before, for example for all users of a cluster.
const GIVEN: &str = "PHALANX_MPI_SHIM";

/// The variable that names the compiler, if it is not `mpicc`.
const COMPILER: &str = "MPICC";

/// The shim of this machine's MPI library: the file that PHALANX_MPI_SHIM names, or one that `mpicc`
/// builds at its first use and that is kept in the user's cache.
pub fn find_shim() -> Result<PathBuf, CommError> {
    if let Some(given) = std::env::var_os(GIVEN).filter(|given| !given.is_empty()) {
        return Ok(given.into());
    }
    let compiler = std::env::var(COMPILER).unwrap_or_else(|_| "mpicc".to_owned());
    let key = describe(&compiler)?;
    let folder = cache();
    let refuse = |error: io::Error| {
        failed(
            format!("the MPI shim cannot be kept in {}: {error}", folder.display()),
            "set XDG_CACHE_HOME to a folder that can be written, or PHALANX_MPI_SHIM to a shim that is built",
        )
    };
    fs::create_dir_all(&folder).map_err(refuse)?;
    let file = folder.join(format!("mpi-{key:016x}.so"));
    if file.exists() {
        return Ok(file);
    }
    // Of several processes that start at once, one builds it.
    let lock = File::create(folder.join(format!("mpi-{key:016x}.lock"))).map_err(refuse)?;
    lock.lock().map_err(refuse)?;
    if !file.exists() {
        build(&compiler, &folder, &file)?;
    }
    Ok(file)
}

/// Builds the shim, under another name until it is complete.
fn build(compiler: &str, folder: &Path, file: &Path) -> Result<(), CommError> {
    let own = std::process::id();
    let (source, part) = (folder.join(format!("{own}.c")), folder.join(format!("{own}.so")));
    let made = fs::write(&source, SOURCE).and_then(|()| {
        let mut command = Command::new(compiler);
        command.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&part).arg(&source);
        let output = command.output()?;
        match output.status.success() {
            true => fs::rename(&part, file),
            false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
        }
    });
    let _ = fs::remove_file(&source);
    made.map_err(|error| {
        let _ = fs::remove_file(&part);
        failed(
            format!("{compiler} cannot build the MPI shim: {}", error.to_string().trim_end()),
            "see whether it builds other programs of MPI, or set MPICC to a compiler that does",
        )
    })
}

/// A number that is another one for another compiler, another library or another text of the shim.
fn describe(compiler: &str) -> Result<u64, CommError> {
    let shown = Command::new(compiler).arg("-show").output();
    let shown = shown.ok().filter(|output| output.status.success()).ok_or_else(|| {
        failed(
            format!("run.ranks = \"mpi\" needs the compiler {compiler}, which cannot be run"),
            "install an MPI library with its compiler (Debian: openmpi-bin and libopenmpi-dev), set MPICC \
             or PHALANX_MPI_SHIM, or let ranks meet over TCP: set MASTER_ADDR and MASTER_PORT, and leave \
             run.ranks out",
        )
    })?;
    let mut words = vec![SOURCE.as_bytes().to_vec(), compiler.into(), shown.stdout];
    // A library that was replaced has another compiler.
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let mut found = std::env::split_paths(&paths).map(|path| path.join(compiler));
    if let Some(found) = found.find_map(|path| fs::canonicalize(path).ok()) {
        let changed = fs::metadata(&found).and_then(|about| about.modified());
        words.push(format!("{} {changed:?}", found.display()).into());
    }
    Ok(words.iter().fold(1, |seed, word| crate::hash::hash(word, seed)))
}

fn cache() -> PathBuf {
    let given = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let home = || given("HOME").map(|home| Path::new(&home).join(".cache"));
    let root = given("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    root.unwrap_or_else(std::env::temp_dir).join("phalanx")
}

fn failed(problem: impl Into<String>, fix: impl Into<String>) -> CommError {
    CommError::Meeting { problem: problem.into(), fix: fix.into() }
}
