//! Measuring time: when each action of one run was issued, started and ended.
//!
//! The engine notes it. A traced run is issued as any other, so its times are those of a step.

use std::time::{Duration, Instant};

use phalanx_engine::{Engine, Times};
use phalanx_script::Lane;

use crate::executor::{Executor, RuntimeError, ScriptId, step};

/// When an action happened, counted from the origin that the run was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimedAction {
    /// The action's number in its script.
    pub action: usize,
    /// Its lane.
    pub lane: Lane,
    /// When it was its turn: from here to the start it waited for others.
    pub issued: Duration,
    /// When everything that it waits for was there.
    pub started: Duration,
    /// When it was seen to be over.
    pub ended: Duration,
}

impl<E: Engine> Executor<E> {
    /// Runs a script once as [`Executor::run`] does, and tells when each action that makes a call
    /// happened, in the order of issue. Ranks that are given one origin can be laid side by side.
    pub fn run_traced(
        &mut self,
        id: ScriptId,
        origin: Instant,
    ) -> Result<Vec<TimedAction>, RuntimeError> {
        self.engine.time(Some(origin));
        let run = self.run(id);
        self.engine.time(None);
        run?;
        let loaded = &mut self.scripts[id.index()];
        let times = self.engine.times(step(loaded)?)?;
        Ok((loaded.actions.iter().zip(loaded.calls.iter()).zip(times))
            .map(|((&action, call), Times { issued, started, ended })| TimedAction {
                action,
                lane: call.lane,
                issued,
                started,
                ended,
            })
            .collect())
    }
}
