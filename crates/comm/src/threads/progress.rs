//! How a call goes from its start to its end, without waiting.
//!
//! A call waits for all to arrive, is matched, moves its data, and ends when no rank touches this
//! rank's memory for it any more. Calls of one group move in their order; different groups do not
//! wait for each other.

use std::time::{Duration, Instant};

use super::board::Posting;
use super::endpoint::{Endpoint, Local};
use super::movement::Movement;
use crate::blocks::Strides;
use crate::call::{Call, OpKind};
use crate::device::{DeviceMover, Reached};
use crate::error::CommError;
use crate::kernel::Meter;
use crate::ragged::Cells;
use crate::site::Site;

/// From this block size on, a move is timed.
const TIMED_BYTES: usize = 16 << 10;

/// A call that was started and not waited for yet.
pub(super) struct Outstanding {
    /// Its group, as this endpoint numbers them.
    pub(super) group: usize,
    pub(super) sequence: u64,
    pub(super) stage: Stage,
    /// How many members are done in this stage.
    pub(super) seen: usize,
    pub(super) posting: Posting,
    pub(super) target: Strides,
    /// Of a ragged call: what is received.
    pub(super) cells: Cells,
    pub(super) tag: u32,
    /// Whether others read and write copies of its buffers.
    pub(super) is_staged: bool,
    /// On a device: the marks at which others have ended their parts, as far as they touch this rank's memory.
    pub(super) ends: Vec<u64>,
}

impl Outstanding {
    /// A call that was posted under a number of its group, with lists that it takes.
    pub(super) fn posted(
        call: &Call<'_>,
        (group, sequence): (usize, u64),
        posting: Posting,
        is_staged: bool,
        (cells, ends): (Cells, Vec<u64>),
    ) -> Self {
        let (target, tag, stage) = (call.blocks.target, call.tag, Stage::Arrive);
        Self { group, sequence, stage, seen: 0, posting, target, cells, tag, is_staged, ends }
    }
}

/// What a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// All members to post the call.
    Arrive,
    /// Those who touch this rank's memory to finish.
    Release,
    /// Nothing: it has ended, and its handle was not waited for yet.
    Done,
    /// The place in the list of calls is free.
    Free,
}

impl Endpoint {
    /// Advances every outstanding call as far as possible; returns whether any advanced.
    pub(super) fn advance(&mut self) -> Result<bool, CommError> {
        if !self.shared.options.exchanges_first {
            return self.sweep(|_| true, false);
        }
        let mut moved = self.sweep(is_exchange, false)?;
        // While another call moved, all may have come to an exchange.
        while self.sweep(|call| !is_exchange(call), true)? {
            moved = true;
            self.sweep(is_exchange, false)?;
        }
        Ok(moved)
    }

    /// Advances some calls as far as possible, or the first that advances at all; returns whether any did.
    fn sweep(
        &mut self,
        some: impl Fn(&Outstanding) -> bool,
        first: bool,
    ) -> Result<bool, CommError> {
        let (mut moved, mut i) = (false, 0);
        while i < self.order.len() && !(first && moved) {
            let index = self.order[i] as usize;
            if !some(&self.calls[index]) {
                i += 1;
                continue;
            }
            let (before, seen) = (self.calls[index].stage, self.calls[index].seen);
            self.advance_call(index)?;
            let call = &self.calls[index];
            moved |= (before, seen) != (call.stage, call.seen);
            if call.stage == Stage::Done {
                self.order.remove(i);
            } else {
                i += 1;
            }
        }
        Ok(moved)
    }

    fn advance_call(&mut self, index: usize) -> Result<(), CommError> {
        loop {
            let stage = self.calls[index].stage;
            let on = match stage {
                Stage::Arrive => self.arrive(index)?,
                Stage::Release => self.release(index)?,
                Stage::Done | Stage::Free => false,
            };
            if !on {
                return Ok(());
            }
            self.calls[index].seen = 0;
        }
    }

    /// Once all have arrived: checks the match and moves the data.
    fn arrive(&mut self, index: usize) -> Result<bool, CommError> {
        let call = &mut self.calls[index];
        let local = &mut self.groups[call.group];
        let (me, n, sequence) = (local.me, local.board.len(), call.sequence);
        if local.cursor != sequence {
            return Ok(false);
        }
        while call.seen < n {
            if call.seen != me && !local.board.has_posted(call.seen, sequence) {
                return Ok(false);
            }
            call.seen += 1;
        }
        // SAFETY: all members have posted, and this one's progress is not past the call.
        unsafe { local.board.check(sequence)? };
        let kind = call.posting.header.kind;
        self.reach_all(index)?;
        let planted = self.shared.options.planted_copy == Some(kind);
        // SAFETY: all have posted and match; no member leaves before this member's progress allows
        // it.
        let bytes = self.moving(index, |movement| unsafe {
            movement.run();
            if planted && movement.meter.bytes > 0 {
                movement.copy_planted();
            }
        })?;
        self.traffic.add(self.calls[index].tag, kind, 1, bytes);
        let slot = self.slot(self.calls[index].group, sequence);
        if let Some(device) = &mut self.device {
            device.finished(slot).map_err(|error| device_error(self.rank, error))?;
        }
        self.finish(index);
        Ok(true)
    }

    /// On a device: finds the buffers and marks of all members of a call that all have posted.
    fn reach_all(&mut self, index: usize) -> Result<(), CommError> {
        let Some(device) = &mut self.device else { return Ok(()) };
        let call = &mut self.calls[index];
        let Local { board, me, .. } = &self.groups[call.group];
        self.scratch.reached.clear();
        for member in 0..board.len() {
            // SAFETY: all members have posted the call with a note, and this one's progress is not
            // past it.
            let note = unsafe { board.note(member, call.sequence) };
            let reached = match member == *me {
                true => Reached::nothing(),
                false => device.reach(note).map_err(|error| device_error(self.rank, error))?,
            };
            if member != *me && is_touched_by(&call.posting, *me, member) {
                call.ends.push(reached.end);
            }
            self.scratch.reached.push(reached);
        }
        Ok(())
    }

    /// Reports that this rank touches no other memory for the call any more.
    fn finish(&mut self, index: usize) {
        let call = &mut self.calls[index];
        let local = &mut self.groups[call.group];
        local.board.set_progress(local.me, call.sequence + 1);
        local.cursor = call.sequence + 1;
        self.shared.wake_members(&local.board, local.me);
        call.stage = Stage::Release;
    }

    /// Ends the call if all members that touch this rank's memory have finished.
    fn release(&mut self, index: usize) -> Result<bool, CommError> {
        let call = &mut self.calls[index];
        let local = &self.groups[call.group];
        let (board, me) = (&local.board, local.me);
        while call.seen < board.len() {
            let touches = call.seen != me && is_touched_by(&call.posting, me, call.seen);
            if touches && board.progress(call.seen) <= call.sequence {
                return Ok(false);
            }
            call.seen += 1;
        }
        // Their marks are in their queues now.
        if let Some(device) = &mut self.device {
            for end in call.ends.drain(..) {
                device.after(end).map_err(|error| device_error(self.rank, error))?;
            }
            self.unused.push(std::mem::take(&mut call.ends));
        }
        call.stage = Stage::Done;
        let (kind, site) = (call.posting.header.kind, call.posting.site);
        self.shared.note(self.rank, board.id, call.sequence, kind, site);
        if let Some(watch) = &self.shared.options.watch {
            watch.ended(kind, &board.name, call.sequence, Site::from_id(site));
        }
        if call.is_staged {
            self.unstage(index);
        }
        Ok(true)
    }

    /// Takes the result of a call that has ended from where other ranks have written it.
    fn unstage(&mut self, index: usize) {
        let Some(staging) = &mut self.staging else { return };
        let start = Instant::now();
        // SAFETY: all ranks that touch the buffers have finished, and the call was not waited for
        // yet, so that by the rules of `start` the user's buffers may be written.
        unsafe { staging.end(index) };
        self.waited.moving += start.elapsed();
    }

    /// Runs something that touches other ranks' memory; gives the bytes it touched there.
    fn moving(
        &mut self,
        index: usize,
        work: impl FnOnce(&mut Movement<'_>),
    ) -> Result<u64, CommError> {
        let call = &self.calls[index];
        let local = &self.groups[call.group];
        let mut movement = Movement {
            board: &local.board,
            me: local.me,
            sequence: call.sequence,
            own: &call.posting,
            target: call.target,
            cells: &call.cells,
            scratch: &mut self.scratch,
            stream: self.shared.spin,
            meter: Meter::default(),
            device: self.device.as_deref_mut().map(|device| device as &mut dyn DeviceMover),
            failed: None,
        };
        let sound = self.shared.touch(self.rank, || {
            // Large moves do not count as waiting; small ones are not worth a look at the clock.
            let start = (call.posting.bytes() >= TIMED_BYTES).then(Instant::now);
            work(&mut movement);
            self.waited.moving += start.map_or(Duration::ZERO, |start| start.elapsed());
        });
        match (sound, movement.failed) {
            (Some(()), None) => Ok(movement.meter.bytes),
            (Some(()), Some(error)) => Err(device_error(self.rank, error)),
            (None, _) => Err(self.aborted()),
        }
    }
}

/// The error of a rank whose device failed.
#[cold]
pub(super) fn device_error(rank: usize, error: String) -> CommError {
    CommError::System { what: format!("the device of rank {rank}"), error }
}

/// Whether every member of a call sends something else to every other one.
fn is_exchange(call: &Outstanding) -> bool {
    matches!(call.posting.header.kind, OpKind::AllToAll | OpKind::AllToAllRagged)
}

/// Whether a member touches memory of `me` for this call.
fn is_touched_by(posting: &Posting, me: usize, member: usize) -> bool {
    let header = &posting.header;
    match header.kind {
        OpKind::Broadcast | OpKind::Scatter => header.to as usize == me,
        OpKind::Reduce | OpKind::Gather => header.to as usize == member,
        OpKind::Permute => header.to as usize == member,
        OpKind::Send => true,
        OpKind::Receive | OpKind::Barrier => false,
        OpKind::AllReduce
        | OpKind::AllGather
        | OpKind::ReduceScatter
        | OpKind::AllToAll
        | OpKind::AllToAllRagged => true,
    }
}
