//! When and where a run leaves checkpoints, and copies of its state on other hosts.
//!
//! A checkpoint is asked for after a step, written beside the next one, brought to the disk beside
//! the one after that, and then committed: a step waits for it only if the disk is slower. A copy in the
//! memory of hosts is the same with another goal; both may be taken after one step.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use phalanx_checkpoint::{Checkpoint, FileSummary, Folder, Manifest, SavedExperts, SavedRecord};
use phalanx_error::{Error, Problem, Result};
use phalanx_script::{ExpertRecord, ReadLayout};
use phalanx_session::{SaveTargets, SavedFiles, Session, again, job};

pub use phalanx_session::folders::CHECKPOINTS;

/// When checkpoints are left, and where.
#[derive(Clone, Debug, Default)]
pub struct Saving {
    /// The folder of all checkpoints; nothing in a process that commits none, because another one of the
    /// run does.
    pub root: Option<PathBuf>,
    /// Steps between checkpoints; 0: none.
    pub every: usize,
    /// Time between checkpoints.
    pub period: Option<Duration>,
    /// How many are kept.
    pub keep: usize,
    /// Steps between copies on other hosts; 0: none.
    pub copy_every: usize,
    /// The configuration, as every checkpoint carries it.
    pub config: String,
}

impl Saving {
    /// Whether there are checkpoints.
    fn is_wanted(&self) -> bool {
        self.every > 0 || self.period.is_some()
    }
}

/// What all manifests of a run say.
#[derive(Clone, Debug, Default)]
pub struct RunFacts {
    /// The seed of weights and masks.
    pub seed: u64,
    /// The data, in words.
    pub corpus: String,
    /// The model, in the form of a `config.json`, if it has one.
    pub model: Option<String>,
    /// The ranks and their layout, for people.
    pub layout: String,
    /// What multiplies matrices, in words.
    pub products: String,
    /// A step, and the samples that were given out before the next one.
    pub start: (u64, u64),
    /// Samples of a step.
    pub batch: u64,
    /// The elements of each kind of state.
    pub kinds: std::collections::BTreeMap<String, u64>,
}

/// A checkpoint that is on the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommittedCheckpoint {
    /// Steps taken.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
}

/// The checkpoints of a run.
pub struct Checkpoints {
    saving: Saving,
    facts: RunFacts,
    /// When the last one was asked for.
    last: Instant,
    pending: Option<Pending>,
    /// The step of the newest one that is whole.
    committed: Option<u64>,
}

/// What was asked for and is not committed yet.
struct Pending {
    step: u64,
    /// The folder of a checkpoint, in the process that commits it.
    folder: Option<Attempt>,
    is_checkpoint: bool,
    is_copy: bool,
    /// The numbers that the state has beside parameters.
    scalars: BTreeMap<String, f64>,
    experts: Option<SavedExperts>,
}

/// The folder of a checkpoint that is being written. If nothing comes of it, because the disk is full for
/// example, its files make room for others.
struct Attempt(Folder);

impl Drop for Attempt {
    fn drop(&mut self) {
        self.0.discard();
    }
}

impl Checkpoints {
    /// The checkpoints and copies that are asked for, if any.
    pub fn new(saving: Saving, facts: RunFacts) -> Option<Self> {
        let copies = saving.copy_every > 0 && again::hosts_keep_copies();
        let copy_every = if copies { saving.copy_every } else { 0 };
        let saving = Saving { copy_every, ..saving };
        (saving.is_wanted() || copies).then_some(())?;
        Some(Self { saving, facts, last: Instant::now(), pending: None, committed: None })
    }

    /// To be called after each step but the last: commits what is written, and asks for more if it is
    /// time. Gives the checkpoints that this process has committed.
    pub fn after_step(
        &mut self,
        session: &mut Session,
        step: u64,
    ) -> Result<Option<CommittedCheckpoint>> {
        let mut committed = None;
        if self.pending.as_ref().is_some_and(|pending| step >= pending.step + 2) {
            committed = self.commit(session)?;
        }
        let is_checkpoint = self.is_due(session, step)?;
        let every = self.saving.copy_every as u64;
        let is_copy = every > 0 && step.is_multiple_of(every);
        if is_checkpoint || is_copy {
            committed = self.commit(session)?.or(committed);
            let (folder, place) = self.folder(session, step, is_checkpoint)?;
            let to = SaveTargets { folder: place.as_deref(), copy: is_copy.then_some(step) };
            session.save_beside_next_step(to)?;
            if is_checkpoint {
                self.last = Instant::now();
            }
            let (scalars, experts) = (session.scalars()?, logged(session));
            self.pending = Some(Pending { step, folder, is_checkpoint, is_copy, scalars, experts });
        }
        Ok(committed)
    }

    /// Saves the end of a run, if it is not saved yet.
    pub fn at_end(&mut self, session: &mut Session) -> Result<Vec<CommittedCheckpoint>> {
        let step = session.steps();
        if self.pending.as_ref().is_some_and(|pending| pending.step == step) {
            // Asked for beside a step that never came.
            self.pending = None;
        }
        let mut all: Vec<_> = self.commit(session)?.into_iter().collect();
        if self.saving.is_wanted() && self.committed != Some(step) && step > 0 {
            let (folder, place) = self.folder(session, step, true)?;
            session.save_now(SaveTargets { folder: place.as_deref(), copy: None })?;
            let (scalars, is_checkpoint, is_copy) = (session.scalars()?, true, false);
            let experts = logged(session);
            self.pending = Some(Pending { step, folder, is_checkpoint, is_copy, scalars, experts });
            all.extend(self.commit(session)?);
        }
        Ok(all)
    }

    /// Whether it is time for a checkpoint, by the clock of any process.
    fn is_due(&self, session: &mut Session, step: u64) -> Result<bool> {
        if self.saving.every > 0 && step.is_multiple_of(self.saving.every as u64) {
            return Ok(true);
        }
        let Some(period) = self.saving.period else { return Ok(false) };
        Ok(session.largest(u64::from(self.last.elapsed() >= period))? == 1)
    }

    /// Makes the folder of a checkpoint, in the process that writes the run's folder; gives where all
    /// processes write their files.
    fn folder(
        &self,
        session: &mut Session,
        step: u64,
        is_checkpoint: bool,
    ) -> Result<(Option<Attempt>, Option<PathBuf>)> {
        if !is_checkpoint {
            return Ok((None, None));
        }
        let folder = self.saving.root.as_ref().map(|root| Folder::new(root, step));
        let made = folder.as_ref().map_or(Ok(()), Folder::create);
        let place = folder.as_ref().filter(|_| made.is_ok()).map(Folder::temporary);
        let place = place.map(|place| std::path::absolute(&place).unwrap_or(place));
        let place = session.from_first(place.unwrap_or_default().as_os_str().as_bytes())?;
        made?;
        if place.is_empty() {
            return Err(job::reported_by_first("the folder of a checkpoint could not be made"));
        }
        Ok((folder.map(Attempt), Some(PathBuf::from(OsString::from_vec(place)))))
    }

    /// Waits for what is being written, and makes it known.
    fn commit(&mut self, session: &mut Session) -> Result<Option<CommittedCheckpoint>> {
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let Pending { step, folder, is_checkpoint, is_copy, scalars, experts } = pending;
        let SavedFiles { disk, copies, needs } = session.saved()?;
        if is_copy {
            let manifest = self.manifest(step, copies, scalars.clone(), experts.clone());
            self.publish(session, &manifest, &needs)?;
        }
        if is_checkpoint {
            self.committed = Some(step);
        }
        let Some(folder) = folder else { return Ok(None) };
        let bytes = disk.iter().map(|file| file.bytes).sum();
        let Saving { config, keep, .. } = &self.saving;
        let path = folder.0.commit(&self.manifest(step, disk, scalars, experts), config, *keep)?;
        Ok(Some(CommittedCheckpoint { step, path, bytes }))
    }

    /// Makes a copy known to all hosts. No process goes on before that: the next copy takes the place of
    /// those before this one.
    fn publish(
        &self,
        session: &mut Session,
        manifest: &Manifest,
        needs: &[Vec<String>],
    ) -> Result<()> {
        let told = match job::is_first() {
            true => again::publish_copy(manifest, needs),
            false => Ok(()),
        };
        let failed = session.largest(u64::from(told.is_err()))?;
        told?;
        match failed {
            0 => Ok(()),
            _ => Err(job::reported_by_first("a copy could not be made known to all hosts")),
        }
    }

    fn manifest(
        &self,
        step: u64,
        files: Vec<FileSummary>,
        scalars: BTreeMap<String, f64>,
        experts: Option<SavedExperts>,
    ) -> Manifest {
        let facts = self.facts.clone();
        let RunFacts { seed, corpus, model, layout, products, batch, kinds, .. } = facts;
        let (first, samples) = facts.start;
        Manifest {
            format: phalanx_checkpoint::FORMAT,
            step,
            samples: samples + (step - first) * batch,
            seed,
            corpus,
            model,
            layout,
            products,
            scalars,
            records: vec![SavedRecord { step, outcome: "applied".to_owned() }],
            experts,
            kinds,
            files,
        }
    }
}

/// What the last step has logged of its experts.
fn logged(session: &Session) -> Option<SavedExperts> {
    let logged = session.logged()?;
    Some(SavedExperts { layout: logged.layout.name().to_owned(), chosen: logged.chosen.clone() })
}

/// What the step of a checkpoint has logged of its experts.
pub(crate) fn logged_in(checkpoint: &Checkpoint) -> Result<Option<ExpertRecord>> {
    let Manifest { step, experts, .. } = checkpoint.manifest();
    let Some(SavedExperts { layout, chosen }) = experts.clone() else { return Ok(None) };
    let layout = ReadLayout::named(&layout).ok_or_else(|| {
        let path = checkpoint.path().display();
        let problem = Problem::new(format!("{path} says that its step read experts as `{layout}`"));
        Error::refused(problem.fix("own or all, as this program writes it"))
    })?;
    Ok(Some(ExpertRecord { step: *step, layout, chosen }))
}
