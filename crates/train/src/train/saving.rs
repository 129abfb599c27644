//! Keeping what a run has learnt: its weights at the end, and after an error.

use std::path::Path;
use std::time::Duration;

use phalanx_config::Loaded;
use phalanx_error::{Error, Result};
use phalanx_session::job::{self, FailedElsewhere};
use phalanx_sys::interrupt;

use super::Run;
use crate::checkpoints::{CHECKPOINTS, Saving};
use crate::report::Report;
use crate::rundir::{METRICS, RunDir};
use crate::saved;

impl Run<'_> {
    /// The error that the run ends with when a step has failed.
    pub(super) fn after_error(&mut self, report: &Report, error: Error) -> Error {
        if let (true, Some(folder)) = (report.broken(), report.folder()) {
            // Metrics cannot be written any more, but the weights may still be saved.
            let saved = self.on_first(|run| {
                let weights = folder.weights();
                match run.save(&weights) {
                    Ok(()) => run.safe_in(&weights),
                    Err(_) => run.save_elsewhere(folder),
                }
            });
            return error.because(saved.ok().flatten().unwrap_or_default());
        }
        if error.cause::<FailedElsewhere>().is_some() && !job::is_first() {
            // Rank 0 may want to save the weights; if it does not, this ends at once.
            let _ = self.session.follow();
        }
        error
    }

    /// Saves the weights, in another folder if the run's cannot be written.
    pub(super) fn save_or_rescue(&mut self, report: &Report) -> Result<()> {
        let saved = self.on_first(|run| match report.folder() {
            None => Ok(()),
            Some(folder) => {
                let saved = run.save(&folder.weights());
                saved.map_err(|error| error.because(run.save_elsewhere(folder)))
            }
        });
        saved?.unwrap_or(Ok(()))
    }

    /// Does something in the process that writes files; the others give what they hold.
    fn on_first<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Result<Option<T>> {
        if !self.session.lead() {
            self.session.follow()?;
            return Ok(None);
        }
        let done = work(self);
        self.session.release()?;
        Ok(Some(done))
    }

    /// Tries to save weights that cannot be written to the run's folder in another one, and says
    /// what became of them.
    fn save_elsewhere(&mut self, folder: &RunDir) -> String {
        // Who asks twice to stop does not want the weights.
        let wanted = !interrupt::requested_twice();
        let saved = wanted.then(|| folder.rescue(|path| self.save(path).is_ok()));
        match saved.flatten() {
            Some(weights) => self.safe_in(&weights),
            None => {
                let steps = self.session.steps();
                format!("the weights after step {steps} are lost; {METRICS} has the losses")
            }
        }
    }

    fn safe_in(&self, weights: &Path) -> String {
        let steps = self.session.steps();
        format!("the weights after step {steps} are safe in {}", weights.display())
    }

    fn save(&mut self, weights: &Path) -> Result<()> {
        saved::save(weights, self.network.architecture.spec().as_ref(), &mut self.session)
    }
}

/// When a run leaves checkpoints.
pub(super) fn saving(loaded: &Loaded, run: Option<&Path>) -> Saving {
    let config = &loaded.config.run;
    Saving {
        root: run.map(|run| run.join(CHECKPOINTS)),
        every: config.checkpoint_every,
        period: (config.checkpoint_minutes > 0)
            .then(|| Duration::from_secs(60 * config.checkpoint_minutes as u64)),
        keep: config.keep.get(),
        copy_every: config.copy_every,
        config: loaded.to_keep(),
    }
}
