//! Measuring time: when each action of one run was issued, started and ended.
//!
//! A traced run waits for what an action depends on before it launches it, so that waiting and working
//! are told apart. Calls of the compute lane have ended when their launch has been waited for. What goes
//! on by itself on other lanes is asked for after every action, and ends at the latest when somebody
//! waits for it: its end is known to within one action.

use std::time::{Duration, Instant};

use phalanx_engine::{Args, Engine, Event};
use phalanx_script::Lane;

use crate::executor::{Executor, RuntimeError, ScriptId};

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
        let loaded = &self.scripts[id.index()];
        let mut clock = Clock { origin, timed: Vec::new(), running: Vec::new() };
        let mut events: Vec<Option<Event>> = Vec::with_capacity(loaded.calls.len());
        for (action, (call, after)) in loaded.calls.iter().zip(&loaded.after).enumerate() {
            let Some(call) = call else {
                events.push(None);
                continue;
            };
            let issued = clock.now();
            for &event in after.iter().filter_map(|&before| events[before].as_ref()) {
                self.engine.wait(event)?;
                clock.over(event);
            }
            let started = clock.now();
            let args =
                Args { inputs: &call.inputs, outputs: &call.outputs, workspace: call.workspace };
            let event = self.engine.launch(&loaded.kernels[call.kernel], &args, call.lane, &[])?;
            clock.begin(
                TimedAction { action, lane: call.lane, issued, started, ended: started },
                event,
            );
            if call.lane == Lane::Compute {
                self.engine.wait(event)?;
                clock.over(event);
            }
            clock.ask(&mut self.engine)?;
            events.push(Some(event));
        }
        for &event in events.iter().flatten() {
            self.engine.wait(event)?;
            clock.over(event);
        }
        Ok(clock.timed)
    }
}

/// What has been timed, and what of it still goes on.
struct Clock {
    origin: Instant,
    timed: Vec<TimedAction>,
    running: Vec<(Event, usize)>,
}

impl Clock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn begin(&mut self, timed: TimedAction, event: Event) {
        self.running.push((event, self.timed.len()));
        self.timed.push(timed);
    }

    /// Notes the end of an action, unless it is known already.
    fn over(&mut self, event: Event) {
        if let Some(at) = self.running.iter().position(|(running, _)| *running == event) {
            let (_, timed) = self.running.swap_remove(at);
            self.timed[timed].ended = self.now();
        }
    }

    /// Notes the ends of those that are over without anybody having waited for them.
    fn ask<E: Engine>(&mut self, engine: &mut E) -> Result<(), RuntimeError> {
        let mut at = 0;
        while let Some(&(event, _)) = self.running.get(at) {
            match engine.is_over(event)? {
                true => self.over(event),
                false => at += 1,
            }
        }
        Ok(())
    }
}
