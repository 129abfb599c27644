//! Waiting for other ranks: spinning, or sleeping until woken, with a timeout.

use std::time::{Duration, Instant};

use super::endpoint::{Endpoint, Local};
use super::head::ANYBODY;
use super::progress::Stage;
use crate::error::{CommError, Missing};
use crate::sync::{TIMED, looks_again, relax};

/// How much time a rank has spent waiting.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waited {
    /// Processor time.
    pub(super) spinning: Duration,
    /// Wall-clock time.
    pub(super) waited: Duration,
    /// Time spent moving data, which does not count as waiting.
    pub(super) moving: Duration,
}

/// What a rank waits for.
#[derive(Clone, Copy)]
pub(super) enum Goal {
    /// The end of a call.
    Call(usize),
    /// A free slot for another call of a group.
    Room(usize),
    /// Fewer staged calls than there are now.
    Staging(usize),
}

/// A rank that waits for others asks so often whether their processes still live.
const LIFE_SIGNS: Duration = Duration::from_millis(100);

/// How much processor time a wait has used.
///
/// A thread that spins has used the wall-clock time. One that sleeps asks the system, which is
/// slow, but it has the time.
struct Watch {
    start: Instant,
    /// When the system was asked, and its answer.
    asked: Option<(Instant, Duration)>,
}

impl Watch {
    fn ask(&mut self) {
        self.asked = Some((Instant::now(), phalanx_sys::thread_cpu_time()));
    }

    fn spinning(&self) -> Duration {
        match self.asked {
            Some((at, cpu)) => (at - self.start) + (phalanx_sys::thread_cpu_time() - cpu),
            None => self.start.elapsed(),
        }
    }
}

impl Endpoint {
    /// Makes progress on calls until the goal is reached.
    pub(super) fn wait_until(&mut self, goal: Goal) -> Result<(), CommError> {
        self.advance()?;
        if self.is_reached(goal) {
            return Ok(());
        }
        let (start, moving) = (Instant::now(), self.waited.moving);
        let mut watch = Watch { start, asked: None };
        let result = self.wait_longer(goal, &mut watch);
        if watch.asked.is_some() {
            self.tell_wait(None);
        }
        let moving = self.waited.moving - moving;
        self.waited.waited += start.elapsed().saturating_sub(moving);
        self.waited.spinning += watch.spinning().saturating_sub(moving);
        result
    }

    fn is_reached(&mut self, goal: Goal) -> bool {
        match goal {
            Goal::Call(index) => self.calls[index].stage == Stage::Done,
            Goal::Room(group) => self.groups[group].has_room(),
            Goal::Staging(calls) => self.staging.as_ref().is_none_or(|s| s.outstanding() < calls),
        }
    }

    fn wait_longer(&mut self, goal: Goal, watch: &mut Watch) -> Result<(), CommError> {
        let mut since = watch.start;
        // After a long spin, the peer is probably not running, or still computing: then other
        // threads can use this core, and a sleeper that is woken runs at once.
        let mut looks = 0;
        loop {
            let poisoned = self.shared.is_poisoned();
            // Before this rank reports that it was stopped, it looks for a better error: all
            // members of a mismatched call detect the mismatch themselves.
            if self.advance()? {
                since = Instant::now();
            }
            if self.is_reached(goal) {
                return Ok(());
            }
            if poisoned {
                return Err(self.aborted());
            }
            if self.shared.spin && looks_again(looks, watch.start) {
                relax();
                looks += 1;
                continue;
            }
            if watch.asked.is_none() {
                watch.ask();
            }
            self.sleep(goal, since)?;
        }
    }

    /// Says whom this rank waits for, or that it does not wait any more.
    fn tell_wait(&self, goal: Option<Goal>) {
        let Some(watch) = &self.shared.options.watch else { return };
        watch.waits(goal.and_then(|goal| {
            let (group, sequence, stage) = self.blocked(goal);
            self.late(group, sequence, stage).next()
        }));
    }

    /// Sleeps until something changes, unless it changed before the sleep.
    fn sleep(&mut self, goal: Goal, since: Instant) -> Result<(), CommError> {
        self.shared.about_to_park(self.rank, self.waits_for(goal));
        let moved = self.advance();
        let (mut left, mut rested) = (Duration::ZERO, Duration::ZERO);
        if matches!(moved, Ok(false)) && !self.is_reached(goal) && !self.shared.is_poisoned() {
            left = self.shared.options.timeout.saturating_sub(since.elapsed());
            left = if self.staging.is_some() { left.min(LIFE_SIGNS) } else { left };
            self.tell_wait(Some(goal));
            let start = Instant::now();
            self.shared.park(self.rank, left.max(Duration::from_millis(1)));
            rested = start.elapsed();
        }
        self.shared.awake(self.rank);
        if moved? || !TIMED {
            return Ok(());
        }
        if self.staging.is_some() && rested >= left {
            self.check_life(goal)?;
        }
        self.check_clock(goal, since)
    }

    /// The rank that this rank waits for. With one call outstanding, only the first member that has
    /// not arrived can unblock it, and no rank needs this rank meanwhile; so no other rank has to
    /// wake it. Where many ranks share few cores, most arrivals then wake no rank.
    fn waits_for(&self, goal: Goal) -> u64 {
        // A slot for another call may be freed by members that no call of this rank waits for.
        let (&[index], Goal::Call(_)) = (&self.order[..], goal) else { return ANYBODY };
        let call = &self.calls[index as usize];
        let ranks = self.groups[call.group].board.group.ranks();
        ranks.get(call.seen).map_or(ANYBODY, |&rank| rank as u64)
    }

    /// Fails, and stops all ranks, if the process of a rank that this one waits for has ended.
    #[cold]
    fn check_life(&self, goal: Goal) -> Result<(), CommError> {
        let (group, sequence, stage) = self.blocked(goal);
        let mut late = self.late(group, sequence, stage);
        let Some(lost) = late.find(|&rank| self.shared.wall.is_gone(rank)) else {
            return Ok(());
        };
        // Its last words came before its end, so look for them after it.
        self.shared.poison(self.rank, lost, || {
            format!("its process has ended; it {}", self.shared.last_finished(lost))
        });
        Err(self.aborted())
    }

    fn check_clock(&self, goal: Goal, since: Instant) -> Result<(), CommError> {
        let waited = since.elapsed();
        if waited < self.shared.options.timeout {
            return Ok(());
        }
        let (group, sequence, stage) = self.blocked(goal);
        // If nobody is late any more, the others came at the last moment: the next look sees it.
        let late: Vec<usize> = self.late(group, sequence, stage).collect();
        let Some(&first) = late.first() else { return Ok(()) };
        let last = format!("rank {first} {}", self.shared.last_finished(first));
        Err(self.missing((group, sequence, stage), late, last, waited))
    }

    /// The call that this rank waits for, as group, number and stage.
    fn blocked(&self, goal: Goal) -> (usize, u64, Stage) {
        match goal {
            Goal::Call(index) => self.blocking(index),
            Goal::Room(group) => self.groups[group].oldest(group),
            Goal::Staging(_) => {
                let oldest = self.staging.as_ref().and_then(|staging| staging.oldest());
                self.blocking(oldest.unwrap_or_default())
            }
        }
    }

    /// The ranks that a call of this one waits for.
    fn late(&self, group: usize, sequence: u64, stage: Stage) -> impl Iterator<Item = usize> {
        let Local { board, me, .. } = &self.groups[group];
        let is_late = move |member: &usize| match stage {
            Stage::Arrive => !board.has_posted(*member, sequence),
            _ => board.progress(*member) <= sequence,
        };
        let late = (0..board.len()).filter(move |member| member != me).filter(is_late);
        late.map(|member| board.group.ranks()[member])
    }

    /// The error that names the ranks that a call waits for.
    #[cold]
    fn missing(
        &self,
        (group, sequence, stage): (usize, u64, Stage),
        missing: Vec<usize>,
        last: String,
        waited: Duration,
    ) -> CommError {
        let Local { board, me, .. } = &self.groups[group];
        // SAFETY: it is this rank's own posting, which only this rank overwrites.
        let call = unsafe { board.side(*me, sequence) };
        CommError::Missing(Box::new(Missing {
            rank: self.rank,
            missing,
            arrived: stage != Stage::Arrive,
            group: board.name.clone(),
            sequence,
            call,
            waited,
            last,
        }))
    }
}
