//! One rank's end of the transport.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_call::MemoryKind;
use phalanx_sys::Arena;

use super::board::{Board, Posting};
use super::entries::Publisher;
use super::idle::{Goal, Waited};
use super::movement::Scratch;
use super::progress::{Outstanding, Stage, device_error};
use super::staging::{NoRoom, Staging};
use super::world::{Shared, Stopper};
use crate::call::{Call, CollectiveOp};
use crate::communicator::{Busy, Communicator, Handle, Stop};
use crate::device::{CallNote, DeviceMover};
use crate::error::{CommError, Failure};
use crate::group::{Group, GroupId};
use crate::sanity::{self, Member};
use crate::traffic::Traffic;
use crate::volume::Algorithm;

/// The endpoint of a rank that is a thread, or a process of this machine.
///
/// If it is dropped with calls outstanding, all ranks are stopped, and no rank touches this rank's
/// memory any more.
pub(crate) struct Endpoint {
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
    own: Publisher,
    /// Groups and channels, as this endpoint numbers them.
    pub(super) groups: Vec<Local>,
    known: HashMap<Group, GroupId>,
    /// Channels by sender, receiver and number.
    channels: HashMap<(usize, usize, u32), usize>,
    /// By group: the lane of its exchanges, if they go first.
    exchanges: HashMap<usize, usize>,
    pub(super) calls: Vec<Outstanding>,
    free: Vec<u32>,
    /// The calls that have not ended, in the order of their start.
    pub(super) order: Vec<u32>,
    pub(super) scratch: Scratch,
    pub(super) traffic: Traffic,
    pub(super) waited: Waited,
    /// If ranks do not see all of each other's memory.
    pub(super) staging: Option<Staging>,
    /// If calls move a device's memory.
    pub(super) device: Option<Box<dyn DeviceMover>>,
    /// Lists of marks that are used again.
    pub(super) unused: Vec<Vec<u64>>,
}

// SAFETY: the raw pointers in outstanding calls are only followed under the rules of `start`,
// and those to rings lead to what lives as long as the wall; neither depends on the thread.
unsafe impl Send for Endpoint {}

/// A group as one of its members sees it.
pub(super) struct Local {
    pub(super) board: Board,
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
    pub(super) fn new(shared: Arc<Shared>, rank: usize) -> Result<Self, CommError> {
        let world = Group::world(shared.wall.ranks());
        let staging = Staging::of(&shared.wall, rank, shared.options.arena);
        let mut endpoint = Self {
            shared,
            rank,
            own: Publisher::new(rank),
            groups: Vec::new(),
            known: HashMap::new(),
            channels: HashMap::new(),
            exchanges: HashMap::new(),
            calls: Vec::new(),
            free: Vec::new(),
            order: Vec::new(),
            scratch: Scratch::default(),
            traffic: Traffic::default(),
            waited: Waited::default(),
            staging,
            device: None,
            unused: Vec::new(),
        };
        let id = endpoint.join(&world, None, rank)?;
        endpoint.known.insert(world, GroupId(id as u32));
        Ok(endpoint)
    }

    /// Takes part in a group, or in a channel between two ranks, at a place.
    fn join(&mut self, group: &Group, channel: Option<u32>, me: usize) -> Result<usize, CommError> {
        let wall = self.shared.wall.clone();
        let board = Board::new(wall, &mut self.own, group.clone(), channel)?;
        self.groups.push(Local { board, me, posted: 0, cursor: 0, finished: 0 });
        Ok(self.groups.len() - 1)
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
            self.shared.poison(self.rank, self.rank, || error.to_string());
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
    fn lane(&mut self, call: &Call<'_>) -> Result<usize, CommError> {
        let ranks = self.groups[call.group.index()].board.group.ranks();
        let (from, to, channel) = match call.op {
            CollectiveOp::Send { to, channel } => (self.rank, ranks[to], channel),
            CollectiveOp::Receive { from, channel } => (ranks[from], self.rank, channel),
            CollectiveOp::AllToAll | CollectiveOp::AllToAllRagged { .. }
                if self.shared.options.exchanges_first =>
            {
                return self.exchange_lane(call.group.index());
            }
            _ => return Ok(call.group.index()),
        };
        if let Some(&lane) = self.channels.get(&(from, to, channel)) {
            return Ok(lane);
        }
        let pair = Group::pair(from, to);
        let lane = self.join(&pair, Some(channel), usize::from(to == self.rank))?;
        self.channels.insert((from, to, channel), lane);
        Ok(lane)
    }

    /// The lane of a group's exchanges, where these need not wait for calls that were started before them.
    fn exchange_lane(&mut self, group: usize) -> Result<usize, CommError> {
        // Messages have the channels of small numbers.
        const CHANNEL: u32 = u32::MAX;
        if let Some(&lane) = self.exchanges.get(&group) {
            return Ok(lane);
        }
        let Local { board, me, .. } = &self.groups[group];
        let (ranks, me) = (board.group.clone(), *me);
        let lane = self.join(&ranks, Some(CHANNEL), me)?;
        self.exchanges.insert(group, lane);
        Ok(lane)
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
    ///
    /// # Safety
    /// As for `start`.
    unsafe fn post(
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
        let group = self.lane(call)?;
        if !self.groups[group].has_room() {
            self.wait_until(Goal::Room(group))?;
        }
        let (send, receive, is_staged) = match (&self.staging, &self.device) {
            (None, _) => (send, receive, false),
            (Some(_), Some(_)) => {
                self.own.name(&self.shared.wall, call.site)?;
                (send, receive, false)
            }
            // SAFETY: the caller follows the rules of `start`, and the call is valid.
            (Some(_), None) => unsafe { self.share(call, send, receive)? },
        };
        let note = self.announce(group, send, receive)?;
        let origin = self.shared.wall.origin;
        let (send, receive) = (origin.spot(send), origin.spot(receive));
        let local = &mut self.groups[group];
        let (sequence, posting) = (local.posted, Posting::of(call, send, receive));
        local.posted += 1;
        // SAFETY: this endpoint alone posts for its rank, numbers are consecutive, and there is
        // room: all members have finished the call that was in the slot.
        unsafe { local.board.post(local.me, sequence, posting, call.op, note.as_ref()) };
        if let Some(watch) = &self.shared.options.watch {
            watch.began(call.op.kind(), &local.board.name, sequence, call.site);
        }
        self.shared.wake_members(&local.board, local.me);
        // A list that an earlier call has had is used again, so that no call allocates.
        let used = self.free.last().map(|&last| &mut self.calls[last as usize].cells);
        let cells = used.map(std::mem::take).unwrap_or_default().refilled(call.op);
        let lists = (cells, self.unused.pop().unwrap_or_default());
        let call = Outstanding::posted(call, (group, sequence), posting, is_staged, lists);
        let index = self.store(call);
        if let (true, Some(staging)) = (is_staged, &mut self.staging) {
            staging.began(index as usize);
        }
        Ok(Handle(index))
    }

    /// On a device: marks that the buffers of the next call of a group are ready.
    fn announce(
        &mut self,
        group: usize,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Option<CallNote>, CommError> {
        let slot = self.slot(group, self.groups[group].posted);
        let Some(device) = &mut self.device else { return Ok(None) };
        let note = device.announce(slot, send, receive);
        note.map(Some).map_err(|error| device_error(self.rank, error))
    }

    /// The number of the slot that a call of a group takes, among those of all groups.
    pub(super) fn slot(&self, group: usize, sequence: u64) -> u64 {
        let depth = self.groups[group].board.depth();
        group as u64 * depth + sequence % depth
    }

    /// Publishes what other processes need to know of a call: the name of its site, and what lies in
    /// memory that they do not see, once there is room. Gives where both buffers are, and whether
    /// one was replaced.
    ///
    /// # Safety
    /// As for `start`; and the call is valid.
    unsafe fn share(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<(*const u8, *mut u8, bool), CommError> {
        self.own.name(&self.shared.wall, call.site)?;
        let local = &self.groups[call.group.index()];
        let place = (local.board.len(), local.me);
        while let Some(staging) = &mut self.staging {
            // SAFETY: the caller's promises are passed on.
            match unsafe { staging.stage(call, place, send, receive) } {
                Ok(buffers) => return Ok(buffers),
                Err(no_room) if staging.outstanding() == 0 => {
                    return Err(self.too_large(call, &no_room));
                }
                Err(_) => {
                    let goal = Goal::Staging(staging.outstanding());
                    self.wait_until(goal)?;
                }
            }
        }
        Ok((send, receive, false))
    }

    #[cold]
    fn too_large(&self, call: &Call<'_>, NoRoom { bytes, largest }: &NoRoom) -> CommError {
        let problem = format!(
            "its buffers are not in memory that other processes see, and copying their {bytes} \
            bytes there does not fit into the {largest} that are free; take them from \
            Communicator::arena"
        );
        CommError::BadCall { kind: call.op.kind(), site: call.site, rank: self.rank, problem }
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
        self.shared.wall.ranks()
    }

    fn memory(&self) -> MemoryKind {
        self.device.as_ref().map_or(MemoryKind::HOST, |device| device.memory())
    }

    fn attach(&mut self, mover: Box<dyn DeviceMover>) -> Result<(), Box<dyn DeviceMover>> {
        if !self.order.is_empty() {
            return Err(mover);
        }
        self.device = Some(mover);
        Ok(())
    }

    fn group(&mut self, group: &Group) -> Result<GroupId, CommError> {
        if let Some(&id) = self.known.get(group) {
            return Ok(id);
        }
        let me = group.place_of(self.rank, self.world())?;
        let id = GroupId(self.join(group, None, me)? as u32);
        self.known.insert(group.clone(), id);
        Ok(id)
    }

    fn members(&self, id: GroupId) -> &Group {
        &self.groups[id.index()].board.group
    }

    fn arena(&mut self, bytes: usize) -> Result<Option<Arena>, CommError> {
        self.staging.as_ref().map(|staging| staging.arena(bytes)).transpose()
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
        // SAFETY: the caller's promises are passed on.
        unsafe { self.post(call, send, receive) }.map_err(|error| self.fail(error))
    }

    fn take_on(&mut self) -> Result<bool, CommError> {
        let result = if self.shared.is_poisoned() { Err(self.aborted()) } else { self.advance() };
        result.map_err(|error| self.fail(error))
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
        self.take_on().map(drop)
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
        self.shared.poison(self.rank, self.rank, || message.to_string());
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
