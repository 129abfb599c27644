//! A block of steps that do not wait for each other's norm: post-validation.
//!
//! Each step is a script of its own, which ranks run one after the other. All of them find the same norm, so all decide the
//! same: if a step was clipped, the one after it has read other weights than it should have, and is done again.

use phalanx_engine::Engine;
use phalanx_error::Result;
use phalanx_runtime::ScriptId;
use phalanx_script::{AheadPart, BufferKey, Number, Outcome, ScriptKey};

use super::RankWorker;
use super::load::LoadCounter;
use crate::command::{BatchSource, StepReply};
use crate::feed::Scalars;
use crate::forward::{read_scalar, read_scalar_of};
use crate::lowered::BLOCK;
use crate::{StepResult, StepRoom};

impl<E: Engine> RankWorker<E> {
    /// Runs a block of steps, and gives their results. Nothing is left to commit at its end.
    pub(super) fn validated(
        &mut self,
        from: u64,
        batches: &dyn BatchSource,
    ) -> Result<Vec<StepReply>> {
        let mut taken: Vec<StepReply> = Vec::with_capacity(BLOCK);
        let end = from + BLOCK as u64;
        // Counts are those of single steps.
        self.load = LoadCounter::default();
        let (mut step, mut pending, mut repeats) = (from, false, false);
        while step < end {
            let key = self.key_of(pending, step + 1 == end);
            let mut ran = None;
            batches.with(step, &mut |data, lr| {
                let scalars = Scalars { lr, step, seed: self.settings.seed };
                let id = self.fill(key, data, scalars)?;
                // Ranks are not at the same step, so no memory counts as whole before the end of the block.
                self.pulse.iter().for_each(|pulse| pulse.begin(id, end - 1));
                self.executor.run(id)?;
                ran = Some(id);
                Ok(())
            })?;
            let id = ran.expect("a source gives each batch once");
            if pending {
                let (result, valid) = self.committed(id)?;
                self.clipped = !valid;
                taken.push(StepReply::applied(result, repeats));
                repeats = !valid;
                pending = false;
                if !valid {
                    continue;
                }
            }
            if let ScriptKey::Ahead(AheadPart::First | AheadPart::Middle) = key {
                pending = true;
            } else {
                let result = self.result(id, 0, step)?;
                self.clipped = self.was_clipped(id)?;
                taken.push(StepReply::applied(result, repeats));
                repeats = false;
            }
            step += 1;
        }
        for step in from..end {
            self.record(step, Outcome::Applied);
        }
        self.pulse.iter().for_each(|pulse| pulse.end(end - 1));
        Ok(taken)
    }

    /// The script of the next step. After a step that was clipped, the next probably is too: it waits for its norm.
    fn key_of(&self, pending: bool, last: bool) -> ScriptKey {
        match (pending, last) {
            (true, true) => ScriptKey::Ahead(AheadPart::Last),
            (true, false) => ScriptKey::Ahead(AheadPart::Middle),
            (false, false) if !self.clipped => ScriptKey::Ahead(AheadPart::First),
            (false, _) => ScriptKey::Train,
        }
    }

    /// The numbers of the step before the one that a script was run for, and whether that read the right weights.
    fn committed(&mut self, id: ScriptId) -> Result<(StepResult, bool)> {
        let bytes = self.settings.precision.state.size();
        let mut read = |number| {
            let key = BufferKey::NumberOf { number, index: 1 };
            read_scalar_of(&mut self.executor, id, &key, bytes)
        };
        let (loss, grad_norm) = (read(Number::Loss)?, read(Number::GradNorm)?);
        let valid = read(Number::Go)? == 1.0;
        let (scaling, repeated, room) = (None, false, StepRoom::default());
        Ok((StepResult { loss, grad_norm, scaling, repeated, room }, valid))
    }

    /// Whether the gradients of a step that waited for its norm were multiplied by anything but one.
    fn was_clipped(&mut self, id: ScriptId) -> Result<bool> {
        let bytes = self.settings.precision.state.size();
        Ok(read_scalar(&mut self.executor, id, Number::Clip, bytes)? != 1.0)
    }
}

impl StepReply {
    fn applied(result: StepResult, repeated: bool) -> Self {
        let result = StepResult { repeated, ..result };
        Self { result, outcome: Outcome::Applied, traced: None }
    }
}
