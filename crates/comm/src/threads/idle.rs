//! Waiting for other ranks: looking again, or sleeping until woken, and not for ever.

use std::time::{Duration, Instant};

use super::endpoint::{Endpoint, Local};
use super::progress::Stage;
use crate::error::{CommError, Missing};
use crate::sync::{TIMED, current, park_timeout, relax, yield_now};

/// How often to look before looking at the clock, when spinning: some microseconds.
const LOOKS: u32 = 256;

/// What waiting has cost a rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waited {
    /// Processor time.
    pub(super) burnt: Duration,
    /// By the clock.
    pub(super) waited: Duration,
    /// Time spent moving data, which is no waiting.
    pub(super) moving: Duration,
}

/// What a rank waits for.
#[derive(Clone, Copy)]
pub(super) enum Goal {
    /// The end of a call.
    Call(usize),
    /// A free slot for another call of a group.
    Room(usize),
}

impl Endpoint {
    /// Moves calls on until the goal is reached.
    pub(super) fn wait_until(&mut self, goal: Goal) -> Result<(), CommError> {
        self.advance()?;
        if self.is_reached(goal) {
            return Ok(());
        }
        let cpu_time = |spin| if spin { Duration::ZERO } else { phalanx_sys::thread_cpu_time() };
        let spin = self.shared.spin;
        let (start, cpu, moving) = (Instant::now(), cpu_time(spin), self.waited.moving);
        let result = self.wait_longer(goal, start);
        let moving = self.waited.moving - moving;
        let waited = start.elapsed().saturating_sub(moving);
        self.waited.waited += waited;
        // A spinning thread burns its core all the time; one that sleeps has to ask what it used.
        let slept = || cpu_time(spin).saturating_sub(cpu).saturating_sub(moving);
        self.waited.burnt += if spin { waited } else { slept() };
        result
    }

    fn is_reached(&mut self, goal: Goal) -> bool {
        match goal {
            Goal::Call(index) => self.calls[index].stage == Stage::Done,
            Goal::Room(group) => self.groups[group].has_room(),
        }
    }

    fn wait_longer(&mut self, goal: Goal, start: Instant) -> Result<(), CommError> {
        let mut since = start;
        let mut looks = 0u32;
        loop {
            let poisoned = self.shared.is_poisoned();
            // Before this rank says that it was stopped, it looks whether it knows better: all
            // members of a call that does not match find that out by themselves.
            if self.advance()? {
                since = Instant::now();
            }
            if self.is_reached(goal) {
                return Ok(());
            }
            if poisoned {
                return Err(self.aborted());
            }
            if self.shared.spin {
                relax();
                looks = looks.wrapping_add(1);
                if looks.is_multiple_of(LOOKS) {
                    // Whoever is waited for may have lost its core to another program.
                    yield_now();
                    if TIMED {
                        self.check_clock(goal, since)?;
                    }
                }
            } else {
                self.sleep(goal, since)?;
            }
        }
    }

    /// Sleeps until something changed, unless it did before falling asleep.
    fn sleep(&mut self, goal: Goal, since: Instant) -> Result<(), CommError> {
        self.shared.about_to_park(self.rank, current());
        let moved = self.advance();
        if matches!(moved, Ok(false)) && !self.is_reached(goal) && !self.shared.is_poisoned() {
            let left = self.shared.options.timeout.saturating_sub(since.elapsed());
            park_timeout(left.max(Duration::from_millis(1)));
        }
        self.shared.awake(self.rank);
        if !moved? && TIMED { self.check_clock(goal, since) } else { Ok(()) }
    }

    fn check_clock(&self, goal: Goal, since: Instant) -> Result<(), CommError> {
        let waited = since.elapsed();
        if waited < self.shared.options.timeout {
            return Ok(());
        }
        let (group, sequence, stage) = match goal {
            Goal::Call(index) => self.blocking(index),
            Goal::Room(group) => self.groups[group].oldest(group),
        };
        Err(self.missing(group, sequence, stage, waited))
    }

    /// Who keeps a call from going on, in words.
    #[cold]
    fn missing(&self, group: usize, sequence: u64, stage: Stage, waited: Duration) -> CommError {
        let Local { board, me, .. } = &self.groups[group];
        let is_late = |member: &usize| match stage {
            Stage::Arrive => !board.has_posted(*member, sequence),
            Stage::Parts => board.progress(*member) < 2 * sequence + 1,
            _ => board.progress(*member) < 2 * sequence + 2,
        };
        let late = (0..board.len()).filter(|member| member != me).filter(is_late);
        let missing: Vec<usize> = late.map(|member| board.group.ranks()[member]).collect();
        let last =
            missing.first().map_or_else(String::new, |&rank| self.shared.last_finished(rank));
        // SAFETY: it is this rank's own posting, which only this rank overwrites.
        let posting = unsafe { board.posting(*me, sequence) };
        CommError::Missing(Box::new(Missing {
            rank: self.rank,
            missing,
            arrived: stage != Stage::Arrive,
            group: board.name.clone(),
            sequence,
            call: posting.side(&board.group, *me),
            waited,
            last,
        }))
    }
}
