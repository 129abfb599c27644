//! Jobs that are started again by the program that started their ranks: torchrun after a failure, Slurm
//! after a requeue. The run that such a job began goes on from its newest whole checkpoint.
//!
//! A run's folder keeps the name of the job that made it, so that the job finds it again.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use phalanx_error::Result;

use crate::checkpoints::CHECKPOINTS;
use crate::resume::Resume;

/// The file in a run's folder that names the job which made it.
pub(crate) const STARTED_BY: &str = "started_by";

/// A job as the program that starts its ranks names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct OuterJob {
    /// The same for all starts of the job.
    pub(crate) name: String,
    /// How many times it was started before.
    pub(crate) before: u64,
}

impl OuterJob {
    /// The job of this process, if it is in one that may be started again.
    pub(crate) fn find() -> Option<Self> {
        Self::of(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn of(get: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let before = |name: &str| get(name).and_then(|text| text.parse().ok()).unwrap_or(0);
        if let Some(run) = get("TORCHELASTIC_RUN_ID") {
            // Without a name of the run, the place where it meets tells it from others.
            let place = |name: &str| get(name).unwrap_or_default();
            let name = format!("torchrun {run} {}:{}", place("MASTER_ADDR"), place("MASTER_PORT"));
            return Some(Self { name, before: before("TORCHELASTIC_RESTART_COUNT") });
        }
        let name = format!("slurm {}", get("SLURM_JOB_ID")?);
        Some(Self { name, before: before("SLURM_RESTART_COUNT") })
    }

    /// Writes the job's name to the folder of a run that it has begun.
    pub(crate) fn sign(run: &Path) -> io::Result<()> {
        let Some(job) = Self::find() else { return Ok(()) };
        fs::File::create(run.join(STARTED_BY))?.write_all(job.name.as_bytes())
    }

    /// Whether the job of this process was started again and has begun the run in this folder.
    pub(crate) fn is_again(run: &Path) -> bool {
        let own = Self::find().filter(|job| job.before > 0);
        own.is_some_and(|job| {
            fs::read_to_string(run.join(STARTED_BY)).is_ok_and(|by| by == job.name)
        })
    }

    /// The last run that the job has begun.
    fn run(&self, runs: &Path) -> Option<PathBuf> {
        let folders = fs::read_dir(runs).into_iter().flatten().flatten().map(|entry| entry.path());
        let own = folders.filter_map(|run| {
            let file = run.join(STARTED_BY);
            let same = fs::read_to_string(&file).ok()? == self.name;
            let time = fs::metadata(&file).ok()?.modified().ok()?;
            same.then_some((time, run))
        });
        own.max().map(|(_, run)| run)
    }
}

impl Resume {
    /// Where a job goes on that torchrun or Slurm has started again; nothing if it was not, or has left
    /// no whole checkpoint in `runs`. The text is for people.
    pub fn of_requeued(runs: impl FnOnce() -> Result<PathBuf>) -> Result<Option<(Self, String)>> {
        let Some(job) = OuterJob::find().filter(|job| job.before > 0) else { return Ok(None) };
        let run = job
            .run(&runs()?)
            .filter(|run| phalanx_checkpoint::newest(&run.join(CHECKPOINTS)).is_some());
        let Some(run) = run else { return Ok(None) };
        let resumed = Self::in_folder(&run)?;
        let (steps, path) = (resumed.steps(), run.display());
        let text = format!("{} was started again: {path} goes on after step {steps}", job.name);
        Ok(Some((resumed, text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<OuterJob> {
        OuterJob::of(&|name: &str| {
            let mut pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|(own, _)| *own == name).map(|(_, value)| value.to_owned())
        })
    }

    #[test]
    fn a_job_has_the_same_name_whenever_it_is_started() {
        let job = |name: &str, before| Some(OuterJob { name: name.to_owned(), before });
        assert_eq!(of("RANK=1 WORLD_SIZE=2"), None);
        let torch = "TORCHELASTIC_RUN_ID=none MASTER_ADDR=a MASTER_PORT=7";
        assert_eq!(of(torch), job("torchrun none a:7", 0));
        let again = format!("{torch} TORCHELASTIC_RESTART_COUNT=2");
        assert_eq!(of(&again), job("torchrun none a:7", 2));
        assert_eq!(of("SLURM_JOB_ID=9 SLURM_RESTART_COUNT=1"), job("slurm 9", 1));
        assert_eq!(of("SLURM_JOB_ID=9 SLURM_RESTART_COUNT=x"), job("slurm 9", 0));
    }
}
