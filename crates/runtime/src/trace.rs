//! Measuring time: when each action of one run was issued, started and ended.
//!
//! The engine records it. A traced run is issued like any other, so its times are those of a normal
//! step.

use std::time::{Duration, Instant};

use phalanx_engine::{CallPart, CallTimes, Engine};
use phalanx_script::Lane;

use crate::executor::{Executor, RuntimeError, ScriptId, step};

/// When an action happened, counted from the origin that the run was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimedAction {
    /// The action's number in its script.
    pub action: usize,
    /// Its lane.
    pub lane: Lane,
    /// When it was issued: from here to its start it waited for others.
    pub issued: Duration,
    /// When everything that it waits for was ready.
    pub started: Duration,
    /// When its end was noticed.
    pub ended: Duration,
}

impl<E: Engine> Executor<E> {
    /// Runs a script once as [`Executor::run`] does, and gives the times of each action that makes
    /// a call, in the order of issue. The times of ranks with the same origin can be compared.
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
            .map(|((&action, call), CallTimes { issued, started, ended })| TimedAction {
                action,
                lane: call.lane,
                issued,
                started,
                ended,
            })
            .collect())
    }

    /// What each call of the traced run consisted of, in the order of its times; nothing from engines
    /// that do not time parts of calls.
    pub fn traced_parts(&mut self, id: ScriptId) -> Result<Vec<Vec<CallPart>>, RuntimeError> {
        let loaded = &mut self.scripts[id.index()];
        Ok(self.engine.parts(step(loaded)?)?)
    }
}
