//! One rank's end of the transport.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_call::MemoryKind;

use super::board::{Board, Posting};
use super::idle::{Goal, Waited};
use super::movement::Scratch;
use super::progress::{Outstanding, Stage};
use super::world::{Shared, Stopper};
use crate::call::{Call, CollectiveOp};
use crate::communicator::{Busy, Communicator, Handle, Stop};
use crate::error::{CommError, Failure};
use crate::group::{Group, GroupId};
use crate::sanity::{self, Member};
use crate::traffic::Traffic;
use crate::volume::Algorithm;

/// The endpoint of a rank that is a thread.
///
/// If it is dropped with calls outstanding, all ranks are stopped, and no rank touches this rank's
/// memory any more.
pub(crate) struct Endpoint {
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
    /// Groups and channels, as this endpoint numbers them.
    pub(super) groups: Vec<Local>,
    known: HashMap<Group, GroupId>,
    /// Channels by sender, receiver and number.
    channels: HashMap<(usize, usize, u32), usize>,
    pub(super) calls: Vec<Outstanding>,
    free: Vec<u32>,
    /// The calls that have not ended, in the order of their start.
    pub(super) order: Vec<u32>,
    pub(super) scratch: Scratch,
    pub(super) traffic: Traffic,
    pub(super) waited: Waited,
}

// SAFETY: the raw pointers in outstanding calls are only followed under the rules of `start`,
// which do not depend on the thread.
unsafe impl Send for Endpoint {}

/// A group as one of its members sees it.
pub(super) struct Local {
    pub(super) board: Arc<Board>,
    /// This rank's place in the group.
    pub(super) me: usize,
    /// Calls posted so far.
    posted: u64,
    /// Calls whose data have moved so far.
    pub(super) cursor: u64,
    /// All calls below this number were finished by all members at the last look.
    finished: u64,
}

impl Local {
    /// The call whose slot the next call needs, as group, number and stage.
    pub(super) fn oldest(&self, group: usize) -> (usize, u64, Stage) {
        (group, self.posted.saturating_sub(self.board.depth()), Stage::Release)
    }

    /// Whether the slot of the next call is free: all have finished the call that was in it.
    pub(super) fn has_room(&mut self) -> bool {
        let needed = (self.posted + 1).saturating_sub(self.board.depth());
        if self.finished < needed {
            let progress = (0..self.board.len()).map(|member| self.board.progress(member)).min();
            self.finished = progress.unwrap_or(0);
        }
        self.finished >= needed
    }
}

impl Endpoint {
    pub(super) fn new(shared: Arc<Shared>, rank: usize) -> Self {
        let world = Group::world(shared.ranks.len());
        let mut endpoint = Self {
            shared,
            rank,
            groups: Vec::new(),
            known: HashMap::new(),
            channels: HashMap::new(),
            calls: Vec::new(),
            free: Vec::new(),
            order: Vec::new(),
            scratch: Scratch::default(),
            traffic: Traffic::default(),
            waited: Waited::default(),
        };
        let board = endpoint.shared.board(&world, None);
        let id = endpoint.join(board, rank);
        endpoint.known.insert(world, GroupId(id as u32));
        endpoint
    }

    fn join(&mut self, board: Arc<Board>, me: usize) -> usize {
        self.groups.push(Local { board, me, posted: 0, cursor: 0, finished: 0 });
        self.groups.len() - 1
    }

    /// The error of a rank that is stopped by another one.
    #[cold]
    pub(super) fn aborted(&self) -> CommError {
        let unknown = || Failure { rank: self.rank, message: "for an unknown reason".into() };
        CommError::Aborted(self.shared.failure().unwrap_or_else(unknown))
    }

    /// Stops all ranks because of an error here; returns when no rank touches memory any more.
    #[cold]
    fn fail(&mut self, error: CommError) -> CommError {
        if !matches!(error, CommError::Aborted(_)) {
            self.shared.poison(self.rank, || error.to_string());
        }
        self.shared.quiesce();
        error
    }

    /// The call that blocks a call: the earliest one of its group whose data have not moved yet, or
    /// the call itself. As group, number and stage.
    pub(super) fn blocking(&self, index: usize) -> (usize, u64, Stage) {
        let call = &self.calls[index];
        let cursor = self.groups[call.group].cursor;
        let mut outstanding = self.order.iter().map(|&other| &self.calls[other as usize]);
        let first = outstanding.find(|other| other.group == call.group && other.sequence == cursor);
        match first {
            Some(first) if call.stage == Stage::Arrive => (call.group, cursor, first.stage),
            _ => (call.group, call.sequence, call.stage),
        }
    }

    /// The group that a call is matched in: its own, or the channel of a message.
    fn lane(&mut self, call: &Call<'_>) -> usize {
        let ranks = self.groups[call.group.index()].board.group.ranks();
        let (from, to, channel) = match call.op {
            CollectiveOp::Send { to, channel } => (self.rank, ranks[to], channel),
            CollectiveOp::Receive { from, channel } => (ranks[from], self.rank, channel),
            _ => return call.group.index(),
        };
        if let Some(&lane) = self.channels.get(&(from, to, channel)) {
            return lane;
        }
        let pair = Group::pair(from, to);
        let board = self.shared.board(&pair, Some(channel));
        let lane = self.join(board, usize::from(to == self.rank));
        self.channels.insert((from, to, channel), lane);
        lane
    }

    /// Refuses calls that are invalid whatever the other ranks do.
    fn check(&self, call: &Call<'_>, send: *const u8, receive: *mut u8) -> Result<(), CommError> {
        let local = self.groups.get(call.group.index());
        let member = local.map(|local| Member { place: local.me, of: local.board.len() });
        sanity::check(call, self.rank, member, send, receive)
    }

    /// Takes an entry in the list of calls.
    fn store(&mut self, call: Outstanding) -> u32 {
        let index = match self.free.pop() {
            Some(index) => {
                self.calls[index as usize] = call;
                index
            }
            None => {
                self.calls.push(call);
                // Room for freeing and ordering as many calls as there are, so that neither ever
                // allocates on its own.
                self.free.reserve(self.calls.len());
                self.calls.len() as u32 - 1
            }
        };
        self.order.push(index);
        index
    }

    /// Starts a call that was found valid.
    fn post(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        if self.shared.is_poisoned() {
            return Err(self.aborted());
        }
        self.check(call, send, receive)?;
        self.traffic.reserve(call.tag);
        let group = self.lane(call);
        if !self.groups[group].has_room() {
            self.wait_until(Goal::Room(group))?;
        }
        let local = &mut self.groups[group];
        let (sequence, posting) = (local.posted, Posting::of(call, send, receive));
        local.posted += 1;
        // SAFETY: this endpoint alone posts for its rank, numbers are consecutive, and there is
        // room: all members have finished the call that was in the slot.
        unsafe { local.board.post(local.me, sequence, posting, call.op) };
        self.shared.wake_members(&local.board, local.me);
        let (target, tag, stage) = (call.blocks.target, call.tag, Stage::Arrive);
        let call = Outstanding { group, sequence, stage, seen: 0, posting, target, tag };
        Ok(Handle(self.store(call)))
    }

    fn known_call(&self, handle: &Handle) -> Result<usize, CommError> {
        let index = handle.0 as usize;
        match self.calls.get(index) {
            Some(call) if call.stage != Stage::Free => Ok(index),
            _ => Err(CommError::UnknownHandle { rank: self.rank }),
        }
    }
}

impl Communicator for Endpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.ranks.len()
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::HOST
    }

    fn group(&mut self, group: &Group) -> Result<GroupId, CommError> {
        if let Some(&id) = self.known.get(group) {
            return Ok(id);
        }
        let me = group.place_of(self.rank, self.world())?;
        let board = self.shared.board(group, None);
        let id = GroupId(self.join(board, me) as u32);
        self.known.insert(group.clone(), id);
        Ok(id)
    }

    fn members(&self, id: GroupId) -> &Group {
        &self.groups[id.index()].board.group
    }

    fn algorithm(&self, _call: &Call<'_>) -> Algorithm {
        Algorithm::Ring
    }

    unsafe fn start(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        self.post(call, send, receive).map_err(|error| self.fail(error))
    }

    fn wait(&mut self, handle: Handle) -> Result<(), CommError> {
        let index = self.known_call(&handle)?;
        let result = match self.calls[index].stage {
            Stage::Done => Ok(()),
            _ => self.wait_until(Goal::Call(index)),
        };
        result.map_err(|error| self.fail(error))?;
        self.calls[index].stage = Stage::Free;
        self.free.push(handle.0);
        Ok(())
    }

    fn test(&mut self, handle: &Handle) -> Result<bool, CommError> {
        let index = self.known_call(handle)?;
        self.progress()?;
        Ok(self.calls[index].stage == Stage::Done)
    }

    fn progress(&mut self) -> Result<(), CommError> {
        let result = if self.shared.is_poisoned() { Err(self.aborted()) } else { self.advance() };
        result.map(drop).map_err(|error| self.fail(error))
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn reset_traffic(&mut self) {
        self.traffic.clear();
    }

    fn busy(&self) -> Busy {
        let Waited { spinning, waited, .. } = self.waited;
        Busy { busy: phalanx_sys::thread_cpu_time().saturating_sub(spinning), spinning, waited }
    }

    fn abort(&mut self, message: &str) {
        self.shared.poison(self.rank, || message.to_string());
        self.shared.quiesce();
    }

    fn stopper(&self) -> Arc<dyn Stop> {
        Arc::new(Stopper { shared: self.shared.clone(), rank: self.rank })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.order.is_empty() {
            let count = self.order.len();
            self.abort(&format!("it left while {count} of its calls were outstanding"));
        }
    }
}
