//! One step of a rank: the scripts that the controller asks for.

use std::time::Instant;

use phalanx_engine::Engine;
use phalanx_error::Result;
use phalanx_runtime::ScriptId;
use phalanx_script::{Choice, Outcome, ReadLayout, ScriptKey};

use super::{RankWorker, without};
use crate::command::{BatchSource, StepReply};
use crate::feed::{Scalars, StepData};
use crate::save::Saves;
use crate::traced::{TracedStep, describe};
use crate::{StepResult, StepRoom, StepScale};

/// A step that is about to be taken.
#[derive(Clone, Copy)]
struct Taking<'a> {
    data: &'a StepData<'a>,
    scalars: Scalars,
    /// When the step is timed, since when.
    origin: Option<Instant>,
    batches: &'a dyn BatchSource,
    /// Whether another script runs after the updates, or the state is saved beside the step.
    followed: bool,
}

impl<E: Engine> RankWorker<E> {
    pub(super) fn step_at(
        &mut self,
        step: u64,
        data: &StepData<'_>,
        lr: f64,
        origin: Option<Instant>,
        batches: &dyn BatchSource,
    ) -> Result<StepReply> {
        let scalars = Scalars { lr, step, seed: self.settings.seed };
        let Choice(keys) = self.controller.next(step, &self.records);
        let saves = self.saves.as_ref().is_some_and(Saves::is_waiting);
        let followed = keys.len() > 1 || saves;
        let taking = Taking { data, scalars, origin, batches, followed };
        let (mut traced, mut result) = (None, None);
        for &key in keys.iter() {
            if key == ScriptKey::Train {
                result = Some(self.train_step(&taking, saves, &mut traced)?);
                continue;
            }
            let id = self.fill(key, data, scalars)?;
            self.pulse.iter().for_each(|pulse| pulse.begin(id, step));
            self.executor.run(id)?;
        }
        self.pulse.iter().for_each(|pulse| pulse.end(step));
        if keys.len() > 1 {
            // The batch lies where the step can be repeated, whatever ran after it.
            let train = self.scripts.get_mut(&self.last);
            let train = train.ok_or_else(|| without(ScriptKey::Train))?;
            train.feed.write(&mut self.executor, data, scalars)?;
        }
        let result = result.ok_or_else(|| without(ScriptKey::Train))?;
        let outcome = match result.scaling {
            Some(StepScale { overflowed: true, .. }) => Outcome::Skipped,
            _ => Outcome::Applied,
        };
        self.record(step, outcome);
        Ok(StepReply { result, outcome, traced })
    }

    /// Runs the script of a step, again with more room for rows of experts while some find none.
    fn train_step(
        &mut self,
        taking: &Taking<'_>,
        mut saves: bool,
        traced: &mut Option<TracedStep>,
    ) -> Result<StepResult> {
        let mut room = StepRoom::default();
        loop {
            self.last = self.step_key();
            let key = if saves { ScriptKey::SaveAndTrain } else { self.last };
            let id = self.run_training(key, taking, traced)?;
            if saves {
                // The state from before the step, which a repeated step leaves as it is.
                self.end_save()?;
            }
            saves = false;
            let lacking = self.lacking(id)?;
            if lacking > 0 {
                self.grow(taking.scalars.step, &mut room, lacking)?;
                continue;
            }
            // Now: another script may use the same memory.
            let result = self.result(id, 0, taking.scalars.step)?;
            self.load.count(&mut self.executor, id, &self.at)?;
            self.keep_predictions(id, taking.followed)?;
            room.bound = self.last_bound();
            if self.reads == ReadLayout::Own {
                self.ladder.applied();
            }
            return Ok(StepResult { room, ..result });
        }
    }

    fn run_training(
        &mut self,
        key: ScriptKey,
        &Taking { data, scalars, origin, batches, .. }: &Taking<'_>,
        traced: &mut Option<TracedStep>,
    ) -> Result<ScriptId> {
        let id = self.fill(key, data, scalars)?;
        self.pulse.iter().for_each(|pulse| pulse.begin(id, scalars.step));
        match origin {
            None => self.run_and_expect(id, scalars.step, batches)?,
            Some(origin) => {
                let timed = self.executor.run_traced(id, origin)?;
                let parts = self.executor.traced_parts(id)?;
                let actions = describe(timed, parts, self.executor.script(id));
                *traced = Some(TracedStep { script: key, actions });
            }
        }
        Ok(id)
    }
}
