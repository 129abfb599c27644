//! Several steps that ranks take without waiting for each other in between, as one script or as one for each step.

use std::ops::Range;

use phalanx_engine::Engine;
use phalanx_error::Result;
use phalanx_script::{AheadPart, Outcome, ScriptKey};

use super::load::LoadCounter;
use super::{RankWorker, without};
use crate::command::{BatchSource, StepReply};
use crate::feed::Scalars;
use crate::lowered::BLOCK;
use crate::save::Saves;

impl<E: Engine> RankWorker<E> {
    /// Whether the first of these steps are run as a block: if there are enough of them, and none of them is saved or
    /// traced by itself.
    pub(super) fn takes_block(&self, steps: Range<u64>, traced: Option<u64>) -> bool {
        let block = steps.start..steps.start + BLOCK as u64;
        let alone = traced.is_some_and(|step| block.contains(&step));
        let saves = self.saves.as_ref().is_some_and(Saves::is_waiting);
        let known = [ScriptKey::Block, ScriptKey::Ahead(AheadPart::First)];
        let known = known.iter().any(|key| self.scripts.contains_key(key));
        known && !alone && !saves && block.end <= steps.end
    }

    /// Runs a block of steps, and gives their results.
    pub(super) fn block(&mut self, from: u64, batches: &dyn BatchSource) -> Result<Vec<StepReply>> {
        if !self.scripts.contains_key(&ScriptKey::Block) {
            return self.ahead(from, batches);
        }
        let key = ScriptKey::Block;
        let seed = self.settings.seed;
        let loaded = self.scripts.get_mut(&key).ok_or_else(|| without(key))?;
        for index in 0..BLOCK {
            let step = from + index as u64;
            batches.with(step, &mut |data, lr| {
                let scalars = Scalars { lr, step, seed };
                loaded.feed.write_step(&mut self.executor, index, data, scalars)
            })?;
        }
        loaded.runs += 1;
        // Counts are those of single steps.
        self.load = LoadCounter::default();
        let (id, last) = (loaded.id, from + BLOCK as u64 - 1);
        self.pulse.iter().for_each(|pulse| pulse.begin(id, last));
        self.executor.run(id)?;
        let taken = (0..BLOCK).map(|index| {
            let step = from + index as u64;
            let result = self.result(id, index, step)?;
            self.record(step, Outcome::Applied);
            Ok(StepReply { result, outcome: Outcome::Applied, traced: None })
        });
        let taken = taken.collect::<Result<_>>()?;
        self.pulse.iter().for_each(|pulse| pulse.end(last));
        Ok(taken)
    }
}
