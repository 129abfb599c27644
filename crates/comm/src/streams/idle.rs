//! Waiting for other ranks, with a timeout.

use std::time::{Duration, Instant};

use super::calls::Stage;
use super::endpoint::Endpoint;
use super::link::Last;
use crate::error::{CommError, Missing};
use crate::sync::{Poll, TIMED, relax, yield_now};

/// A rank that was stopped from outside notices it after at most this time.
const REST: Duration = Duration::from_millis(50);

/// How long a rank that has a core for itself looks for data before it sleeps.
const LOOKING: Duration = Duration::from_micros(200);

/// How long of that it does not offer the core to others: a small message takes no longer.
const AT_HAND: Duration = Duration::from_micros(20);

impl Endpoint {
    /// Makes progress on calls until one has ended.
    pub(super) fn wait_until_done(&mut self, index: u32) -> Result<(), CommError> {
        let mut rested = false;
        let result = self.wait_longer(index, &mut rested);
        if let Some(watch) = self.options.watch.as_ref().filter(|_| rested) {
            watch.waits(None);
        }
        result
    }

    fn wait_longer(&mut self, index: u32, rested: &mut bool) -> Result<(), CommError> {
        let (mut since, mut looked) = (Instant::now(), false);
        loop {
            let failed = self.shared.failure().is_some();
            // Before this rank reports that it was stopped, it looks for a better error: all
            // members of a mismatched call detect the mismatch themselves.
            let moved = self.advance()?;
            let done = self.calls[index as usize].stage == Stage::Done;
            if (done || moved) && std::mem::take(&mut looked) {
                self.spun += since.elapsed();
            }
            if done {
                return Ok(());
            }
            if failed && !self.is_in_doubt() {
                return Err(self.aborted());
            }
            if moved {
                since = Instant::now();
                continue;
            }
            // What is on its way comes soon; a rank that sleeps would notice it late.
            if TIMED && self.spins && since.elapsed() < LOOKING {
                looked = true;
                self.look(since);
                continue;
            }
            if std::mem::take(&mut looked) {
                self.spun += since.elapsed();
            }
            self.check_streams(since.elapsed())?;
            if since.elapsed() >= self.options.timeout {
                return Err(self.missing(index, since.elapsed(), None));
            }
            if let Some(watch) = &self.options.watch {
                watch.waits(self.late(index).next());
            }
            *rested = true;
            self.rest(self.options.timeout.saturating_sub(since.elapsed()));
        }
    }

    /// Whether another rank has reported a mismatch, and this rank still needs an announcement to
    /// detect it too.
    pub(super) fn is_in_doubt(&self) -> bool {
        let Some(doubt) = &self.doubt else { return false };
        let lane = &self.lanes[doubt.lane];
        let Some(call) = lane.find(doubt.sequence) else { return false };
        let call = &self.calls[call as usize];
        let silent =
            |(member, &rank): (usize, &usize)| !call.has_come(member) && !self.links[rank].gone;
        doubt.since.elapsed() < self.options.timeout
            && call.stage == Stage::Arrive
            && lane.group.ranks().iter().enumerate().any(silent)
    }

    /// Looks, for a short time, until a stream can be read or written. It asks the kernel, and does not try to read: a
    /// read locks its connection, and what comes meanwhile waits for the lock.
    fn look(&mut self, since: Instant) {
        let mut poll = std::mem::take(&mut self.poll);
        poll.clear();
        self.watch(&mut poll);
        loop {
            match since.elapsed() {
                time if time < AT_HAND => relax(),
                time if time < LOOKING => yield_now(),
                _ => break,
            }
            if poll.is_ready() || self.shared.failure().is_some() {
                break;
            }
        }
        self.poll = poll;
    }

    /// Sleeps until a stream can be read or written.
    fn rest(&mut self, left: Duration) {
        let start = Instant::now();
        let mut poll = std::mem::take(&mut self.poll);
        poll.clear();
        self.watch(&mut poll);
        poll.wait(left.min(REST));
        self.poll = poll;
        self.waited += start.elapsed();
    }

    /// Adds the streams to what is waited for, until one can be read, or written where there is something to write.
    pub(super) fn watch(&self, poll: &mut Poll) {
        for (rank, link) in self.links.iter().enumerate().filter(|(_, link)| !link.gone) {
            if let Some(wire) = self.shared.wire(rank) {
                wire.watch(poll, wire.has_work(!link.blocks.is_empty()));
            }
        }
    }

    /// Fails if a rank that some call still needs has closed its stream.
    fn check_streams(&mut self, waited: Duration) -> Result<(), CommError> {
        for &index in &self.order {
            let gone = |rank: usize| self.links[rank].gone.then_some(rank);
            let found = self.late(index).find_map(gone);
            if let Some(gone) = found {
                self.gone = Some(gone);
                return Err(self.missing(index, waited, Some(gone)));
            }
        }
        Ok(())
    }

    /// The ranks that a call waits for: those that have not arrived, or, if all have, those with
    /// which data must still be exchanged.
    fn late(&self, index: u32) -> impl Iterator<Item = usize> {
        let call = &self.calls[index as usize];
        let lane = &self.lanes[call.lane];
        let is_late = move |(member, rank): (usize, &usize)| {
            let link = &self.links[*rank];
            let late = match call.silent {
                0 => {
                    !call.has_given(member)
                        || link.blocks.iter().any(|block| block.call == index)
                        || link.marks.iter().any(|(_, call)| *call == index)
                }
                _ => !call.has_come(member),
            };
            late.then_some(*rank)
        };
        lane.group.ranks().iter().enumerate().filter_map(is_late)
    }

    /// The error that names the ranks that a call waits for; `gone` is one of them that has left.
    #[cold]
    fn missing(&self, index: u32, waited: Duration, gone: Option<usize>) -> CommError {
        let call = &self.calls[index as usize];
        let lane = &self.lanes[call.lane];
        let missing = gone.map_or_else(|| self.late(index).collect(), |gone| vec![gone]);
        let last = match (gone, missing.first()) {
            (Some(gone), _) => format!("rank {gone} has closed its stream"),
            (None, Some(&rank)) => format!("rank {rank} {}", self.last_of(rank)),
            (None, None) => "all ranks have come".to_string(),
        };
        CommError::Missing(Box::new(Missing {
            rank: self.shared.rank,
            missing,
            arrived: call.silent == 0,
            group: lane.name.clone(),
            sequence: call.sequence,
            call: call.header().side(&lane.group, lane.me, call.site()),
            waited,
            last,
        }))
    }

    /// What a rank did last, as far as this rank has seen, as text.
    fn last_of(&self, rank: usize) -> String {
        let Some(Last { kind, lane, sequence, site, seen }) = self.links[rank].last else {
            return "has finished no call with this rank yet".to_string();
        };
        let (did, group) = (if seen { "finished" } else { "arrived at" }, &self.lanes[lane].name);
        let by = self.shared.rank;
        format!("last {did} {kind} #{sequence} of group {group} at `{site}`, as rank {by} saw it")
    }
}
