//! Announces what the next step will read while a step runs, so that a device can fetch it meanwhile.

use phalanx_engine::Engine;
use phalanx_error::Result;
use phalanx_runtime::ScriptId;

use super::RankWorker;
use crate::command::BatchSource;
use crate::feed::Scalars;

impl<E: Engine> RankWorker<E> {
    /// Runs the script of a step, and tells the engine meanwhile what the next step will read.
    pub(super) fn run_and_expect(
        &mut self,
        id: ScriptId,
        step: u64,
        batches: &dyn BatchSource,
    ) -> Result<()> {
        self.executor.begin(id)?;
        if let Some(train) = self.scripts.get_mut(&self.step_key()) {
            let seed = self.settings.seed;
            let expected = batches.with_next(step, &mut |data, lr| {
                let scalars = Scalars { lr, step: step + 1, seed };
                train.feed.expect(&mut self.executor, data, scalars)
            });
            // It costs time only: what is wrong with the data is said when its step takes it.
            drop(expected);
        }
        Ok(self.executor.end(id)?)
    }
}
