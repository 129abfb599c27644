//! When and where a run leaves checkpoints.
//!
//! A checkpoint is asked for after a step, written beside the next one, brought to the disk beside
//! the one after that, and then committed: a step waits for it only if the disk is slower.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_checkpoint::{Folder, Manifest, SavedRecord};
use phalanx_config::Loaded;
use phalanx_error::{Result, bytes};
use phalanx_session::{Session, job};

use crate::report::Report;

pub use phalanx_session::folders::CHECKPOINTS;

/// The checkpoints of a run.
pub(crate) struct Checkpoints {
    /// Where they are; nothing in a process that commits none, because another one of the run does.
    root: Option<PathBuf>,
    every: usize,
    period: Option<Duration>,
    keep: usize,
    facts: Facts,
    /// The configuration, as every checkpoint carries it.
    config: String,
    /// When the last one was asked for.
    last: Instant,
    pending: Option<Pending>,
    /// The step of the newest one that is whole.
    committed: Option<u64>,
}

/// What all manifests of a run say.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) seed: u64,
    pub(crate) corpus: String,
    pub(crate) model: Option<String>,
    pub(crate) layout: String,
    /// The samples that were given out before a step.
    pub(crate) start: (u64, u64),
    /// Samples of a step.
    pub(crate) batch: u64,
    /// The elements of each kind of state.
    pub(crate) kinds: std::collections::BTreeMap<String, u64>,
}

/// A checkpoint that was asked for and is not committed yet.
struct Pending {
    folder: Option<Folder>,
    step: u64,
}

impl Checkpoints {
    /// The checkpoints that a configuration asks for, if any, in a run's folder.
    pub(crate) fn new(loaded: &Loaded, run: Option<&Path>, facts: Facts) -> Option<Self> {
        let config = &loaded.config.run;
        config.saves().then(|| Self {
            root: run.map(|run| run.join(CHECKPOINTS)),
            every: config.checkpoint_every,
            period: (config.checkpoint_minutes > 0)
                .then(|| Duration::from_secs(60 * config.checkpoint_minutes as u64)),
            keep: config.keep.get(),
            facts,
            config: loaded.config.anchored().to_toml(),
            last: Instant::now(),
            pending: None,
            committed: None,
        })
    }

    /// To be called after each step but the last: commits what is on the disk, and asks for a new
    /// checkpoint if it is time.
    pub(crate) fn after_step(
        &mut self,
        session: &mut Session,
        step: u64,
        report: &mut Report,
    ) -> Result<()> {
        if self.pending.as_ref().is_some_and(|pending| step >= pending.step + 2) {
            self.commit(session, report)?;
        }
        if !self.is_due(session, step)? {
            return Ok(());
        }
        self.commit(session, report)?;
        let (folder, place) = self.folder(session, step)?;
        session.save_beside_next_step(&place)?;
        self.last = Instant::now();
        self.pending = Some(Pending { folder, step });
        Ok(())
    }

    /// Saves the end of a run, if it is not saved yet.
    pub(crate) fn at_end(&mut self, session: &mut Session, report: &mut Report) -> Result<()> {
        let step = session.steps();
        if self.pending.as_ref().is_some_and(|pending| pending.step == step) {
            // Asked for beside a step that never came.
            self.pending = None;
        }
        self.commit(session, report)?;
        if self.committed == Some(step) || step == 0 {
            return Ok(());
        }
        let (folder, place) = self.folder(session, step)?;
        session.save_now(&place)?;
        self.pending = Some(Pending { folder, step });
        self.commit(session, report)
    }

    /// Whether it is time for a checkpoint, by the clock of any process.
    fn is_due(&self, session: &mut Session, step: u64) -> Result<bool> {
        if self.every > 0 && step.is_multiple_of(self.every as u64) {
            return Ok(true);
        }
        let Some(period) = self.period else { return Ok(false) };
        Ok(session.largest(u64::from(self.last.elapsed() >= period))? == 1)
    }

    /// Makes the folder of a checkpoint, in the process that writes the run's folder; gives where all
    /// processes write their files.
    fn folder(&self, session: &mut Session, step: u64) -> Result<(Option<Folder>, PathBuf)> {
        let folder = self.root.as_ref().map(|root| Folder::new(root, step));
        let made = folder.as_ref().map_or(Ok(()), Folder::create);
        let place = folder.as_ref().filter(|_| made.is_ok()).map(Folder::temporary);
        let place = place.map(|place| std::path::absolute(&place).unwrap_or(place));
        let place = session.from_first(place.unwrap_or_default().as_os_str().as_bytes())?;
        made?;
        if place.is_empty() {
            return Err(job::reported_by_first("the folder of a checkpoint could not be made"));
        }
        Ok((folder, PathBuf::from(OsString::from_vec(place))))
    }

    /// Waits for the checkpoint that is being written, and gives it its name.
    fn commit(&mut self, session: &mut Session, report: &mut Report) -> Result<()> {
        let Some(Pending { folder, step }) = self.pending.take() else { return Ok(()) };
        let files = session.saved()?;
        let size: u64 = files.iter().map(|file| file.bytes).sum();
        let Facts { seed, corpus, model, layout, start: (first, samples), batch, kinds } =
            self.facts.clone();
        let manifest = Manifest {
            format: phalanx_checkpoint::FORMAT,
            step,
            samples: samples + (step - first) * batch,
            seed,
            corpus,
            model,
            layout,
            scalars: Default::default(),
            records: vec![SavedRecord { step, outcome: "applied".to_owned() }],
            kinds,
            files,
        };
        self.committed = Some(step);
        let Some(folder) = folder else { return Ok(()) };
        let path = folder.commit(&manifest, &self.config, self.keep)?;
        report.saved(step, &path, &bytes(size))
    }
}
