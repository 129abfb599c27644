//! Predictions of a training step after which another script ran: it may use their memory, so they are
//! copied before.

use phalanx_engine::Engine;
use phalanx_models::port;
use phalanx_runtime::ScriptId;
use phalanx_script::ScriptKey;

use super::RankWorker;
use crate::command::Exposed;
use crate::forward::shown;
use phalanx_error::Result;

/// What this rank holds of the predictions of the last step, by micro-batch, if they were copied.
#[derive(Default)]
pub(super) struct Kept(Option<Vec<Option<Exposed>>>);

impl Kept {
    /// What was copied of a value; `None` if it is still where its script left it.
    pub(super) fn of(
        &self,
        key: ScriptKey,
        port: &str,
        microbatch: usize,
    ) -> Option<Option<Exposed>> {
        let all =
            self.0.as_ref().filter(|_| key == ScriptKey::Train && port == port::PREDICTION)?;
        Some(all.get(microbatch).cloned().flatten())
    }
}

impl<E: Engine> RankWorker<E> {
    /// Copies the predictions of a training script if a later one follows in the same step, or if it is not the one
    /// that is asked for them.
    pub(super) fn keep_predictions(&mut self, script: ScriptId, needed: bool) -> Result<()> {
        self.kept = Kept::default();
        if !needed {
            return Ok(());
        }
        let (mesh, rank) = &self.at;
        let copied = (0..self.settings.microbatches).map(|microbatch| {
            shown(&mut self.executor, script, (mesh, *rank), (port::PREDICTION, None, microbatch))
        });
        self.kept = Kept(Some(copied.collect::<Result<_>>()?));
        Ok(())
    }
}
