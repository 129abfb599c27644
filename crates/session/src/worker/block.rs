//! Several steps that ranks take without waiting for each other in between: an endless row of scripts where a pipeline does
//! not drain, or one script for each step where steps go ahead of their norms.

use std::ops::Range;

use phalanx_engine::Engine;
use phalanx_error::Result;
use phalanx_script::{AheadPart, BufferKey, Number, Outcome, RollPart, ScriptKey};

use super::load::LoadCounter;
use super::{RankWorker, without};
use crate::command::{BatchSource, StepReply};
use crate::feed::Scalars;
use crate::lowered::BLOCK;
use crate::save::Saves;

impl<E: Engine> RankWorker<E> {
    /// How many of these steps are taken together now; none if the next one is taken by itself, because too few come before
    /// one that is saved or traced.
    pub(super) fn takes_together(&self, steps: Range<u64>, traced: Option<u64>) -> u64 {
        let before = traced.filter(|step| steps.contains(step)).unwrap_or(steps.end);
        let room = before - steps.start;
        if self.saves.as_ref().is_some_and(Saves::is_waiting) {
            return 0;
        }
        if self.scripts.contains_key(&ScriptKey::Ahead(AheadPart::First)) {
            return if room < BLOCK as u64 { 0 } else { BLOCK as u64 };
        }
        let each = self.steps_of_roll();
        let whole = each.map_or(0, |each| room / each * each);
        if each.is_none_or(|each| whole < 2 * each) { 0 } else { whole }
    }

    /// Takes so many steps together, and gives their results.
    pub(super) fn together(
        &mut self,
        steps: Range<u64>,
        batches: &dyn BatchSource,
    ) -> Result<Vec<StepReply>> {
        let taken = match self.steps_of_roll() {
            Some(each) => self.roll(steps.clone(), each, batches)?,
            None => self.validated(steps.start, batches)?,
        };
        // The batch lies where the last step can be repeated, whatever used its memory.
        let (step, seed) = (steps.end - 1, self.settings.seed);
        self.last = ScriptKey::Train;
        let train = self.scripts.get_mut(&ScriptKey::Train);
        let train = train.ok_or_else(|| without(ScriptKey::Train))?;
        batches.with(step, &mut |data, lr| {
            train.feed.write(&mut self.executor, data, Scalars { lr, step, seed })
        })?;
        Ok(taken)
    }

    /// Steps that one script of an endless row ends, if there is a row.
    fn steps_of_roll(&self) -> Option<u64> {
        let loaded = self.scripts.get(&ScriptKey::Roll(RollPart::Middle))?;
        let script = self.executor.script(loaded.id);
        let (window, updates) = (script.window?, script.updates.as_ref()?);
        Some((window.microbatches / updates.step) as u64)
    }

    /// Runs a row of scripts, each of so many steps. A rank goes from one to the next without waiting for others; it learns
    /// the numbers of a step while it runs the next script.
    fn roll(
        &mut self,
        steps: Range<u64>,
        each: u64,
        batches: &dyn BatchSource,
    ) -> Result<Vec<StepReply>> {
        let mut taken = Vec::with_capacity((steps.end - steps.start) as usize);
        // Counts are those of single steps.
        self.load = LoadCounter::default();
        for first in steps.clone().step_by(each as usize) {
            let key = ScriptKey::Roll(match (first == steps.start, first + each == steps.end) {
                (true, _) => RollPart::First,
                (false, false) => RollPart::Middle,
                (false, true) => RollPart::Last,
            });
            let seed = self.settings.seed;
            let loaded = self.scripts.get_mut(&key).ok_or_else(|| without(key))?;
            for index in 0..loaded.feed.steps() {
                let step = first + index as u64;
                batches.with(step, &mut |data, lr| {
                    let scalars = Scalars { lr, step, seed };
                    loaded.feed.write_step(&mut self.executor, index, data, scalars)
                })?;
            }
            loaded.runs += 1;
            let id = loaded.id;
            // Ranks are not at the same step, so no memory counts as whole before the end of the row.
            self.pulse.iter().for_each(|pulse| pulse.begin(id, steps.end - 1));
            self.executor.run(id)?;
            let script = self.executor.script(id);
            let known = |index: &usize| {
                let (number, index) = (Number::Loss, *index);
                script.find(&BufferKey::NumberOf { number, index }).is_some()
            };
            for index in 0..(0..).take_while(known).count() {
                let step = steps.start + taken.len() as u64;
                let result = self.result(id, index, step)?;
                taken.push(StepReply { result, outcome: Outcome::Applied, traced: None });
            }
        }
        steps.clone().for_each(|step| self.record(step, Outcome::Applied));
        self.pulse.iter().for_each(|pulse| pulse.end(steps.end - 1));
        Ok(taken)
    }
}
