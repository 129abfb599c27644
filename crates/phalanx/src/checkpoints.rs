//! Checkpoints of a trainer: where they go, and where a training goes on.

use std::io::Write;
use std::path::{Path, PathBuf};

use phalanx_checkpoint::{Checkpoint, FULL, newest_and_damaged};
use phalanx_error::Result;
use phalanx_ir::Model;
use phalanx_session::{Settings, again, job};
use phalanx_train::{CHECKPOINTS, Checkpoints, Resume, RunFacts, Saving};

use crate::mistake::Mistake;

/// How many checkpoints are kept.
const KEEP: usize = 3;

/// How many times a launcher starts the program again after a rank was lost.
const RESTARTS: u64 = 10;

/// The checkpoint, after notes about later ones that cannot be used; one process prints them.
fn told(resumed: Resume) -> Result<Option<Checkpoint>> {
    let notes = resumed.notes().into_iter().filter(|_| !job::is_later_rank());
    notes.for_each(|note| drop(writeln!(std::io::stderr(), "note: {note}")));
    Ok(Some(resumed.checkpoint))
}

/// What the user of a trainer asked for about checkpoints.
#[derive(Clone, Debug, Default)]
pub(crate) struct CheckpointPlan {
    /// Steps between checkpoints, and their folder.
    pub(crate) every: Option<(usize, PathBuf)>,
    /// Where to go on.
    pub(crate) resume: Option<PathBuf>,
}

impl CheckpointPlan {
    pub(crate) fn check(&self) -> Result<()> {
        match self.every {
            Some((0, _)) => Err(Mistake::CheckpointEveryZero.into()),
            _ => Ok(()),
        }
    }

    /// The checkpoint to go on from; nothing if the training begins.
    pub(crate) fn found(&self) -> Result<Option<Checkpoint>> {
        let Some(asked) = &self.resume else { return Ok(None) };
        let latest = asked.as_os_str() == "latest" && !asked.exists();
        match (latest, &self.every) {
            (false, _) => told(Resume::in_folder(asked)?),
            (true, None) => Err(Mistake::NoCheckpointFolder.into()),
            // The first start of a program that goes on whenever it is started again.
            (true, Some((_, folder))) => match newest_and_damaged(&folder.join(CHECKPOINTS)) {
                (None, damaged) if damaged.is_empty() => Ok(None),
                _ => told(Resume::in_folder(folder)?),
            },
        }
    }

    /// Whether the same program, started once more, goes on by itself.
    fn goes_on(&self) -> Option<&Path> {
        let (_, folder) = self.every.as_ref()?;
        self.resume.as_ref().filter(|asked| asked.as_os_str() == "latest").map(|_| folder.as_path())
    }

    /// Lets `phalanx launch`, or whatever has started the ranks, start the program again if one is lost.
    pub(crate) fn allow_restarts(&self) {
        if let Some(folder) = self.goes_on() {
            again::allow_program(folder, RESTARTS);
        }
    }

    /// The checkpoints of a training of these parameters, whose manifests say `facts`.
    pub(crate) fn open(
        &self,
        settings: &Settings,
        model: &Model,
        facts: RunFacts,
    ) -> Option<Checkpoints> {
        let (every, folder) = self.every.clone()?;
        let kept = settings.optimizer.kept(model.params().iter().map(|param| &param.shape[..]));
        let kinds = kept.chain([(FULL, model.elements())]);
        let kinds = kinds.map(|(kind, count)| (kind.to_owned(), count as u64)).collect();
        let saving = Saving {
            root: job::is_first().then(|| folder.join(CHECKPOINTS)),
            every,
            keep: KEEP,
            config: "# a program that uses the library\n".to_owned(),
            ..Saving::default()
        };
        Checkpoints::new(saving, RunFacts { seed: settings.seed, kinds, ..facts })
    }
}
