//! Steps that lack room for the rows of experts, and are taken again.
//!
//! Every rank learns the same number of rows that found no room, so all decide the same. A step with such rows has
//! changed nothing; it runs again with the next bound, and so do the steps after it. After many steps the bound before
//! is tried again: routers that are trained to balance need little room most of the time.

use phalanx_engine::Engine;
use phalanx_error::{Error, Problem, Result, bytes};
use phalanx_runtime::ScriptId;
use phalanx_script::{BufferKey, Number, ReadLayout, ScriptKey};

use super::RankWorker;
use crate::StepRoom;
use crate::forward::read_scalar;

/// Steps with a larger bound before a smaller one is tried again.
const PATIENCE: u32 = 200;

/// Which bound steps have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ladder {
    /// Counted from 0.
    pub(super) bound: u8,
    /// Steps since it was last too small.
    since: u32,
}

impl Ladder {
    /// The script of a step.
    pub(super) fn key(self) -> ScriptKey {
        match self.bound {
            0 => ScriptKey::Train,
            larger => ScriptKey::Roomier(larger),
        }
    }

    /// After a step that lacked room.
    fn up(&mut self) {
        *self = Self { bound: self.bound + 1, since: 0 };
    }

    /// After a step that was applied.
    pub(super) fn applied(&mut self) {
        self.since += 1;
        if self.bound > 0 && self.since == PATIENCE {
            *self = Self { bound: self.bound - 1, since: 0 };
        }
    }
}

impl<E: Engine> RankWorker<E> {
    /// The script of a step that is to be taken.
    pub(super) fn step_key(&self) -> ScriptKey {
        match self.reads {
            ReadLayout::Own => self.ladder.key(),
            ReadLayout::All => ScriptKey::Gathered,
        }
    }

    /// Which bound the last step had, counted from 0; behind all of them one that read all experts, which needs none.
    pub(super) fn last_bound(&self) -> usize {
        match self.last {
            ScriptKey::Roomier(bound) => usize::from(bound),
            ScriptKey::Gathered => {
                1 + self.scripts.keys().filter(|key| matches!(key, ScriptKey::Roomier(_))).count()
            }
            _ => 0,
        }
    }

    /// How many rows found no room in the step that a script was just run for.
    pub(super) fn lacking(&mut self, script: ScriptId) -> Result<u64> {
        let key = BufferKey::Number(Number::Lacking);
        if self.executor.script(script).find(&key).is_none() {
            return Ok(0);
        }
        let bytes = self.settings.precision.state.size();
        Ok(read_scalar(&mut self.executor, script, Number::Lacking, bytes)? as u64)
    }

    /// Takes the next bound after a step in which so many rows found no room.
    pub(super) fn grow(&mut self, step: u64, room: &mut StepRoom, lacking: u64) -> Result<()> {
        if room.repeats == 0 {
            room.lacking = lacking;
        }
        room.repeats += 1;
        self.ladder.up();
        let Some(id) = self.scripts.get(&self.ladder.key()).map(|loaded| loaded.id) else {
            let problem =
                Problem::new(format!("step {step}: {lacking} rows of experts found no room"));
            let why = "the session was given no model with more room";
            return Err(Error::failed(problem.because(why).fix("Experts::slack = None")));
        };
        let (limit, needed) = (self.settings.memory_limit, self.executor.plan(id).arena);
        match limit.and_then(|limit| limit.asked()).filter(|limit| needed > *limit) {
            None => Ok(()),
            Some(limit) => Err(Error::failed(
                Problem::new(format!(
                    "step {step}: {lacking} rows of experts found no room, and with the next bound a rank takes {}; \
                     run.memory_limit allows {}",
                    bytes(needed as u64),
                    bytes(limit as u64)
                ))
                .fix("a larger run.memory_limit; more train.microbatches; or a larger model.aux_loss, so that choices are more even"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_was_too_small_is_tried_again_later() {
        let mut ladder = Ladder::default();
        assert_eq!(ladder.key(), ScriptKey::Train);
        (0..2 * PATIENCE).for_each(|_| ladder.applied());
        assert_eq!(ladder.key(), ScriptKey::Train);
        (0..2).for_each(|_| ladder.up());
        for step in 0..2 * PATIENCE {
            let expected = 2 - step / PATIENCE;
            assert_eq!(ladder.key(), ScriptKey::Roomier(expected as u8), "{step}");
            ladder.applied();
        }
        assert_eq!(ladder.key(), ScriptKey::Train);
        // A step that lacks room starts the count anew.
        ladder.up();
        (1..PATIENCE).for_each(|_| ladder.applied());
        ladder.up();
        (1..PATIENCE).for_each(|_| ladder.applied());
        assert_eq!(ladder.key(), ScriptKey::Roomier(2));
    }
}
