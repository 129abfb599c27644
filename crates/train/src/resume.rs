//! Going on with a run: finding its checkpoint, and what the run was.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use phalanx_checkpoint::{Checkpoint, LATEST, MANIFEST, newest_and_damaged};
use phalanx_config::Sources;
use phalanx_error::{Error, Problem, Result};

use crate::checkpoints::CHECKPOINTS;
use crate::rundir::{CONFIG, WEIGHTS};

/// A run that is to go on.
#[derive(Debug)]
pub struct Resume {
    /// Where it goes on.
    pub checkpoint: Checkpoint,
    /// The run's folder, if the checkpoint lies in one.
    pub run: Option<PathBuf>,
    /// What is wrong with later checkpoints of the run, which cannot be used.
    pub damaged: Vec<Error>,
}

impl Resume {
    /// Finds a checkpoint: in a run's folder, its newest whole one; the folder of a checkpoint; or
    /// `latest`, the run in `runs` that saved last; only then that folder is asked for.
    pub fn find(given: &Path, runs: impl FnOnce() -> Result<PathBuf>) -> Result<Self> {
        match given.as_os_str() == "latest" && !given.exists() {
            true => Self::in_folder(&last_saved(&runs()?)?),
            false => Self::in_folder(given),
        }
    }

    /// The newest whole checkpoint in a run's folder, or the checkpoint that this folder is.
    pub fn in_folder(run: &Path) -> Result<Self> {
        let run = run.to_path_buf();
        let (path, damaged) = match run.join(MANIFEST).exists() {
            true => (Some(run.clone()), Vec::new()),
            false => newest_and_damaged(&run.join(CHECKPOINTS)),
        };
        let Some(path) = path else {
            return Err(damaged.iter().fold(none_in(&run), |told, why| told.because(shortly(why))));
        };
        let checkpoint = Checkpoint::open(&path)?;
        let path = fs::canonicalize(checkpoint.path()).unwrap_or_else(|_| checkpoint.path().into());
        let home = path.parent().filter(|root| root.ends_with(CHECKPOINTS));
        let home = home.and_then(Path::parent).filter(|home| home.join(CONFIG).is_file());
        // As the user names it, if it is that folder.
        let run = home.map(|home| match fs::canonicalize(&run).is_ok_and(|own| own == home) {
            true => run,
            false => home.to_path_buf(),
        });
        Ok(Self { checkpoint, run, damaged })
    }

    /// That later checkpoints of the run are not used, and why: a line each, for people.
    pub fn notes(&self) -> Vec<String> {
        let used = self.checkpoint.path().display();
        let told = |error: &Error| format!("{}; {used} is used instead", shortly(error));
        self.damaged.iter().map(told).collect()
    }

    /// The settings of the run, below those that are given.
    pub fn sources(&self, given: Sources) -> Sources {
        given.run(self.checkpoint.path().join(CONFIG))
    }

    /// Refuses a run of so many steps that was trained to its end. One that was stopped after its last checkpoint,
    /// but before its weights were written, still has to write them.
    pub fn has_work_left(&self, steps: u64) -> Result<()> {
        let taken = self.steps();
        if taken < steps || (taken == steps && self.lacks_weights()) {
            return Ok(());
        }
        let path = self.checkpoint.path().display();
        let problem = Problem::new(format!("{path} is after step {taken}, the last of {steps}"));
        let fix = format!("--set train.steps={}, or more", taken + 1);
        Err(Error::refused(problem.because("there is nothing left to train").fix(fix)))
    }

    /// Whether the run's folder has no weights, or only those of before the checkpoint.
    fn lacks_weights(&self) -> bool {
        let written = |path: PathBuf| fs::metadata(path).ok()?.modified().ok();
        let Some(run) = &self.run else { return false };
        written(run.join(WEIGHTS)) < written(self.checkpoint.path().join(MANIFEST))
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.checkpoint.manifest().step
    }
}

/// What is wrong with a checkpoint, in a line.
pub(crate) fn shortly(error: &Error) -> String {
    let Some(problem) = error.problems().first() else { return String::new() };
    [std::slice::from_ref(&problem.message), &problem.because].concat().join(": ")
}

/// The run that wrote the newest checkpoint.
fn last_saved(runs: &Path) -> Result<PathBuf> {
    let written = |run: &PathBuf| -> Option<SystemTime> {
        fs::metadata(run.join(CHECKPOINTS).join(LATEST)).ok()?.modified().ok()
    };
    let folders = fs::read_dir(runs).into_iter().flatten().flatten().map(|entry| entry.path());
    let newest = folders.filter_map(|run| Some((written(&run)?, run))).max();
    newest.map(|(_, run)| run).ok_or_else(|| {
        let problem = Problem::new(format!("no run in {} has a checkpoint", runs.display()));
        Error::refused(problem.fix(HOW))
    })
}

fn none_in(run: &Path) -> Error {
    let shown = run.display();
    let problem = match (run.exists(), run.join(CHECKPOINTS).is_dir()) {
        (false, _) => Problem::new(format!("there is no folder {shown}")),
        (true, false) => Problem::new(format!("{shown} has no checkpoints")),
        (true, true) => Problem::new(format!("{shown} has no whole checkpoint")),
    };
    Error::refused(problem.fix(HOW))
}

/// What must be done before a run can be resumed.
const HOW: &str =
    "give the folder of a run that was trained with checkpoints: --set run.checkpoint_every=100";
