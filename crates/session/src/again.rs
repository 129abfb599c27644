//! A run whose ranks are started again after one was lost: what the launcher passes to the new processes, and what
//! the run reports to the launcher.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use phalanx_checkpoint::{Checkpoint, Manifest};
use phalanx_comm::{Processes, StateMemory, names};
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::{Allowed, StartPoint};

use super::copies::Stores;
use super::job;

/// Why and from where the ranks of a run were started again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Again {
    /// How many times they were started again so far.
    pub restarts: u64,
    /// Where they go on.
    pub origin: StartPoint,
    /// The run's folder, if it had one already.
    pub folder: Option<PathBuf>,
    /// The rank that was lost, how it was lost, and in which phase of a step; empty between steps.
    pub lost: (usize, String, String),
    /// The step and the samples with which the run began.
    pub first: (u64, u64),
}

/// Whether this process trains a run that can be started again.
static CAN: AtomicBool = AtomicBool::new(false);

/// Says that what this process trains from now on can be started again, before it makes a session:
/// the memory of its ranks outlives them.
pub fn expect() {
    CAN.store(job::recorder().is_some(), Ordering::Relaxed);
}

/// What happened to the processes before this one; nothing if there were none.
pub fn found() -> Option<Again> {
    let words = job::recorder()?.job();
    let restarts = words.epoch();
    (restarts > 0 && words.allowed().is_some()).then(|| Again {
        restarts,
        origin: words.origin(),
        folder: Some(words.folder()).filter(|folder| !folder.is_empty()).map(PathBuf::from),
        lost: words.last_lost(),
        first: words.first(),
    })
}

/// How many ranks there are, if they are fewer than the job was started with.
pub fn fewer() -> Option<usize> {
    let recorder = job::recorder()?;
    let ranks = recorder.job().active();
    (found().is_some() && ranks < recorder.ranks()).then_some(ranks)
}

/// Lets the launcher start the ranks again if one is lost. Only the process of rank 0 says it: first
/// without a folder, and again when the run's folder is there; `first` are the step and the samples with
/// which the run began.
pub fn allow(folder: Option<&Path>, allowed: Allowed, timeout: Duration, first: (u64, u64)) {
    if let Some(recorder) = job::recorder().filter(|_| job::is_first()) {
        let folder =
            folder.map(|own| std::path::absolute(own).unwrap_or_else(|_| own.to_path_buf()));
        let folder = folder.map(|own| own.display().to_string()).unwrap_or_default();
        recorder.job().allow(&folder, allowed, timeout, first);
    }
}

/// Lets the launcher start a program again, so many times, that goes on from the checkpoints in a folder
/// by itself.
pub fn allow_program(folder: &Path, restarts: u64) {
    let allowed = Allowed { restarts, smaller: [0; Allowed::LAYOUTS] };
    allow(Some(folder), allowed, Duration::ZERO, (0, 0));
}

/// The last step is taken and its results are safe: nothing is started again.
pub fn finish() {
    CAN.store(false, Ordering::Relaxed);
    if let Some(recorder) = job::recorder().filter(|_| job::is_first()) {
        recorder.job().finish();
    }
    Processes::hide_memory();
}

/// Whether hosts can keep copies of the state for each other.
pub fn hosts_keep_copies() -> bool {
    Stores::find().is_some_and(|stores| stores.are_several())
}

/// Tells all hosts that a copy is whole. Only the process of rank 0 does it.
pub fn publish_copy(manifest: &Manifest, needs: &[Vec<String>]) -> Result<()> {
    Stores::find().map_or(Ok(()), |stores| stores.publish(manifest, needs))
}

/// The copy that hosts hold after a step.
pub fn open_copy(step: u64) -> Result<Checkpoint> {
    let none = || Error::failed(Problem::new("no host is known that keeps copies"));
    Stores::find().ok_or_else(none)?.read(step)
}

/// The memory in which the ranks of a session keep their state.
pub(crate) fn memory() -> StateMemory {
    if !CAN.load(Ordering::Relaxed) {
        return StateMemory::Own;
    }
    let given = std::env::var(names::MEMORY).ok().and_then(|number| number.parse().ok());
    match (found().map(|again| again.origin), given) {
        // Without the memory it cannot be opened, which is an error, and not an empty memory.
        (Some(StartPoint::Memory(_)), fd) => StateMemory::TakenOver(fd.unwrap_or(-1)),
        _ => StateMemory::Held,
    }
}
