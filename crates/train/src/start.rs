//! Where the processes of a run begin: at its beginning, from a checkpoint, or, after a rank was lost,
//! with what the ranks before them have left.

use std::path::{Path, PathBuf};

use phalanx_config::Loaded;
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::StartPoint;
use phalanx_session::again::{self, Again};

use crate::resume::Resume;

/// What the processes begin with.
pub(crate) enum Start<'a> {
    /// New weights.
    New,
    /// A checkpoint.
    Saved(&'a Resume),
    /// What lies in memory after a step, with the samples that were given out by then.
    Kept { step: u64, samples: u64 },
}

impl Start<'_> {
    /// The steps that were taken, and the samples that were given out.
    pub(crate) fn taken(&self) -> (u64, u64) {
        match self {
            Start::New => (0, 0),
            Start::Saved(Resume { checkpoint, .. }) => {
                let manifest = checkpoint.manifest();
                (manifest.step, manifest.samples)
            }
            Start::Kept { step, samples } => (*step, *samples),
        }
    }
}

/// A run whose ranks were started again.
pub(crate) struct Restart {
    pub(crate) again: Again,
    /// The checkpoint that it goes on from, if it does.
    newest: Option<Resume>,
}

impl Restart {
    /// Finds out whether this process takes the place of one before it.
    pub(crate) fn find() -> Result<Option<Self>> {
        let Some(again) = again::found() else { return Ok(None) };
        let newest = match again.origin {
            StartPoint::Checkpoint(_) => {
                again.folder.as_deref().map(Resume::in_folder).transpose()?
            }
            StartPoint::Copies(step) => {
                let (checkpoint, run) = (again::open_copy(step)?, again.folder.clone());
                Some(Resume { checkpoint, run, damaged: Vec::new() })
            }
            StartPoint::Beginning | StartPoint::Memory(_) => None,
        };
        Ok(Some(Self { again, newest }))
    }

    /// The configuration of a run that goes on with fewer ranks than it began with; nothing if it has
    /// as many.
    pub(crate) fn smaller(loaded: &Loaded) -> Result<Option<Loaded>> {
        let asked = loaded.config.parallel.ranks().get();
        let Some(ranks) = again::fewer() else { return Ok(None) };
        let fits = |smaller: &Loaded| smaller.config.parallel.ranks().get() == ranks;
        let smaller = loaded.shrink(ranks).filter(fits).ok_or_else(|| {
            let problem = format!("no layout of {ranks} ranks can go on for that of {asked}");
            Error::failed(
                Problem::new(problem).fix("phalanx train --resume with a layout that fits"),
            )
        })?;
        Ok(Some(smaller))
    }

    /// Where a run begins that was asked to go on from `resumed`, if from anything; a step takes
    /// `batch` samples.
    pub(crate) fn start<'a>(
        restart: Option<&'a Self>,
        resumed: Option<&'a Resume>,
        batch: u64,
    ) -> Start<'a> {
        let asked = resumed.map_or(Start::New, Start::Saved);
        let Some(Self { again, newest }) = restart else { return asked };
        match (again.origin, newest) {
            (StartPoint::Memory(step), _) => {
                let (first, samples) = again.first;
                Start::Kept { step, samples: samples + step.saturating_sub(first) * batch }
            }
            (StartPoint::Checkpoint(_) | StartPoint::Copies(_), Some(newest)) => {
                Start::Saved(newest)
            }
            _ => asked,
        }
    }

    /// The run's folder, as its user named it if that is where this process is; nothing if the run had
    /// none yet, or this host does not have it.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        let here = std::env::current_dir().unwrap_or_default();
        let folder = self.again.folder.as_ref().filter(|folder| folder.is_dir())?;
        let within = folder.strip_prefix(here).map(Path::to_path_buf);
        Some(within.unwrap_or_else(|_| folder.clone()))
    }

    /// Where it goes on, in one word.
    pub(crate) fn from(&self) -> &'static str {
        match self.again.origin {
            StartPoint::Beginning => "beginning",
            StartPoint::Checkpoint(_) => "checkpoint",
            StartPoint::Memory(_) => "memory",
            StartPoint::Copies(_) => "copies",
        }
    }
}
