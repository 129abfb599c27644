//! One rank's end of the transport.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calls::{Outstanding, Stage};
use super::lane::Lane;
use super::link::Link;
use super::wire::{Shared, Stream};
use crate::call::{Call, CollectiveOp, OpKind};
use crate::communicator::{Busy, Handle, Stop};
use crate::error::{CommError, Failure};
use crate::group::Group;
use crate::kernel::{Place, Pointers};
use crate::sanity::{self, Member};
use crate::sync::Poll;
use crate::threads::Options;

/// How long a rank that leaves waits until its last frames are written.
const LEAVING: Duration = Duration::from_millis(200);

/// The endpoint of a rank that has a stream to every other.
///
/// Memory is read and written by this rank alone, while it is inside one of its calls or has lent its endpoint to a
/// thread, and not after a failure: so after an error, or when the endpoint is dropped, its buffers are free again.
pub(super) struct Endpoint {
    pub(super) shared: Arc<Shared>,
    pub(super) options: Options,
    /// By rank.
    pub(super) links: Vec<Link>,
    /// Groups and channels, including those that only other ranks have named so far.
    pub(super) lanes: Vec<Lane>,
    numbers: HashMap<(Group, Option<u32>), usize>,
    pub(super) calls: Vec<Outstanding>,
    free: Vec<u32>,
    /// The calls that have not ended, in the order of their start.
    pub(super) order: Vec<u32>,
    /// A rank that was found to have left.
    pub(super) gone: Option<usize>,
    /// The call, by group and number, that was found not to match here.
    pub(super) mismatch: Option<(usize, u64)>,
    /// The call that another rank has found not to match.
    pub(super) doubt: Option<ReportedMismatch>,
    /// Whether a thread may use this endpoint, because its rank computes; what it has failed with meanwhile; and
    /// whether the rank leaves.
    pub(super) lent: bool,
    failed: Option<CommError>,
    pub(super) leaves: bool,
    pub(super) waited: Duration,
    /// Whether a rank that waits looks again for a while before it sleeps, and how long it has looked.
    pub(super) spins: bool,
    pub(super) spun: Duration,
    pub(super) poll: Poll,
    /// Memory of an ended reduction, for the next one.
    pub(super) spare: Vec<u64>,
    pub(super) sources: Vec<Place>,
    pub(super) pointers: Pointers,
}

// SAFETY: the raw pointers in outstanding calls are only followed under the rules of `start`,
// which do not depend on the thread.
unsafe impl Send for Endpoint {}

/// A call that another rank reports as a mismatch.
pub(super) struct ReportedMismatch {
    pub(super) lane: usize,
    pub(super) sequence: u64,
    pub(super) since: Instant,
}

impl Endpoint {
    /// The endpoint of a rank with these streams, by rank; none to itself. `local` ranks share this
    /// host's cores.
    pub(super) fn new(
        rank: usize,
        streams: Vec<Option<Box<dyn Stream>>>,
        options: Options,
        local: usize,
    ) -> Self {
        let world = Group::world(streams.len());
        let mut endpoint = Self {
            links: streams.iter().map(|_| Link::default()).collect(),
            shared: Arc::new(Shared::new(rank, streams)),
            spins: options.spins(local),
            spun: Duration::ZERO,
            options,
            lanes: Vec::new(),
            numbers: HashMap::new(),
            calls: Vec::new(),
            free: Vec::new(),
            order: Vec::new(),
            gone: None,
            mismatch: None,
            doubt: None,
            lent: false,
            failed: None,
            leaves: false,
            waited: Duration::ZERO,
            poll: Poll::default(),
            spare: Vec::new(),
            sources: Vec::new(),
            pointers: Pointers::default(),
        };
        endpoint.add_lane(&world, None, rank);
        endpoint
    }

    /// The number of a group, or of a channel between two ranks.
    pub(super) fn lane_for(
        &mut self,
        group: &Group,
        channel: Option<u32>,
    ) -> Result<usize, CommError> {
        let me = group.place_of(self.shared.rank, self.shared.world())?;
        let known = self.numbers.get(&(group.clone(), channel)).copied();
        Ok(known.unwrap_or_else(|| self.add_lane(group, channel, me)))
    }

    fn add_lane(&mut self, group: &Group, channel: Option<u32>, me: usize) -> usize {
        self.lanes.push(Lane::new(group.clone(), channel, me));
        self.numbers.insert((group.clone(), channel), self.lanes.len() - 1);
        self.lanes.len() - 1
    }

    /// How many extra bytes a kind of call moves, in tests of the counters. For a message the
    /// receiver asks for them.
    pub(super) fn planted(&self, kind: OpKind) -> usize {
        let kind = if kind == OpKind::Send { OpKind::Receive } else { kind };
        if self.options.planted_copy == Some(kind) { 64 } else { 0 }
    }

    /// The error of a rank that is stopped by another one.
    #[cold]
    pub(super) fn aborted(&self) -> CommError {
        let rank = self.shared.rank;
        let unknown = || Failure { rank, message: "for an unknown reason".into() };
        CommError::Aborted(self.shared.failure().unwrap_or_else(unknown))
    }

    /// Another rank has reported why it stopped.
    pub(super) fn stopped_by(&mut self, failure: Failure, mismatch: Option<(usize, u64)>) {
        let since = Instant::now();
        self.doubt = mismatch.map(|(lane, sequence)| ReportedMismatch { lane, sequence, since });
        self.stop_others(failure, mismatch);
    }

    /// Stops all ranks because of an error here. From now on no call touches memory.
    #[cold]
    fn fail(&mut self, error: CommError) -> CommError {
        let mismatch = self.mismatch.take();
        self.doubt = None;
        let message = error.to_string().into();
        // A rank that left without a word is the one to look at, not the one that noticed.
        let rank = self.gone.unwrap_or(self.shared.rank);
        self.stop_others(Failure { rank, message }, mismatch);
        error
    }

    /// Reports a failure to the other ranks, and a mismatch to the members of its call.
    fn stop_others(&self, failure: Failure, mismatch: Option<(usize, u64)>) {
        self.shared.fail(failure, |peer| {
            let (lane, sequence) = mismatch?;
            let member = self.lanes[lane].group.index_of(peer)?;
            self.lanes[lane].named[member].then_some((lane as u32, sequence))
        });
    }

    /// Whether nothing may be done any more: some rank has failed, and no mismatch has to be
    /// confirmed.
    fn is_over(&self) -> bool {
        self.doubt.is_none() && self.shared.failure().is_some()
    }

    /// The lane that a call is numbered in: that of its group, or of a message's channel.
    fn lane_of(&mut self, call: &Call<'_>) -> Result<usize, CommError> {
        let ranks = self.lanes[call.group.index()].group.ranks();
        let (from, to, channel) = match call.op {
            CollectiveOp::Send { to, channel } => (self.shared.rank, ranks[to], channel),
            CollectiveOp::Receive { from, channel } => (ranks[from], self.shared.rank, channel),
            _ => return Ok(call.group.index()),
        };
        self.lane_for(&Group::pair(from, to), Some(channel))
    }

    fn post(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        if self.shared.failure().is_some() {
            return Err(self.aborted());
        }
        let lane = self.lanes.get(call.group.index());
        let member = lane.map(|lane| Member { place: lane.me, of: lane.group.len() });
        sanity::check(call, self.shared.rank, member, send, receive)?;
        let number = self.lane_of(call)?;
        let extra = self.planted(call.op.kind());
        let lane = &mut self.lanes[number];
        let sequence = lane.started;
        lane.started += 1;
        let place = (lane.group.len(), lane.me);
        let (at, memory, spare) = ((number, sequence), (send, receive), &mut self.spare);
        let mut call = Outstanding::new(call, at, place, memory, extra, spare);
        while let Some((member, announced)) = lane.take_early(sequence) {
            call.announce(member, announced);
        }
        if let Some(watch) = &self.options.watch {
            watch.began(call.header().kind, &lane.name, sequence, call.site());
        }
        let index = self.store(call);
        self.lanes[number].open.push((sequence, index));
        self.announce(index);
        // The call is announced now; everything else happens in `wait`, or while the rank computes.
        for peer in 0..self.links.len() {
            self.write(peer);
        }
        Ok(Handle(index))
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
                self.calls.len() as u32 - 1
            }
        };
        self.order.push(index);
        index
    }

    fn known_call(&self, handle: &Handle) -> Result<u32, CommError> {
        match self.calls.get(handle.0 as usize) {
            Some(call) if call.stage != Stage::Free => Ok(handle.0),
            _ => Err(CommError::UnknownHandle { rank: self.shared.rank }),
        }
    }
}

impl Endpoint {
    /// Starts a call, by the rules of [`Communicator::start`](crate::Communicator::start), which the caller keeps.
    pub(super) fn start(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        self.post(call, send, receive).map_err(|error| self.fail(error))
    }

    /// Waits for the end of a call; returns the tag, the kind and the bytes that are counted.
    pub(super) fn wait(&mut self, handle: Handle) -> Result<(u32, OpKind, u64), CommError> {
        let index = self.known_call(&handle)?;
        let result = match self.calls[index as usize].stage {
            Stage::Done => Ok(()),
            _ if self.failed.is_some() => self.failed.take().map_or(Ok(()), Err),
            _ if self.is_over() => Err(self.aborted()),
            _ => self.wait_until_done(index),
        };
        result.map_err(|error| self.fail(error))?;
        let call = &mut self.calls[index as usize];
        call.stage = Stage::Free;
        self.free.push(index);
        let bytes = call.bytes.saturating_add_signed(call.plan().uncounted());
        Ok((call.tag, call.header().kind, bytes))
    }

    pub(super) fn test(&mut self, handle: &Handle) -> Result<bool, CommError> {
        let index = self.known_call(handle)?;
        self.progress()?;
        Ok(self.calls[index as usize].stage == Stage::Done)
    }

    pub(super) fn progress(&mut self) -> Result<(), CommError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.move_on().map(|_| ())
    }

    /// Makes progress; says whether there was any.
    fn move_on(&mut self) -> Result<bool, CommError> {
        let result = if self.is_over() { Err(self.aborted()) } else { self.advance() };
        let failed = self.shared.failure().is_some() && !self.is_in_doubt();
        let result = result.and_then(|moved| if failed { Err(self.aborted()) } else { Ok(moved) });
        result.map_err(|error| self.fail(error))
    }

    /// The same while the rank computes: an error is kept for its next call. When there is nothing more to do, or
    /// nothing can be done, the endpoint is not lent any more.
    pub(super) fn go_on(&mut self) -> bool {
        let result = self.move_on();
        self.lent = result.is_ok() && !self.order.is_empty();
        match result {
            Ok(moved) => moved,
            Err(error) => {
                self.failed = Some(error);
                false
            }
        }
    }

    /// Whether some call is not over that moves enough to be worth waking a thread.
    pub(super) fn has_large(&self) -> bool {
        self.order.iter().any(|&index| self.calls[index as usize].is_large())
    }

    pub(super) fn busy(&self) -> Busy {
        let busy = phalanx_sys::thread_cpu_time().saturating_sub(self.spun);
        Busy { busy, spinning: self.spun, waited: self.waited + self.spun }
    }

    pub(super) fn abort(&mut self, message: &str) {
        self.doubt = None;
        self.shared.stop(message);
    }

    pub(super) fn stopper(&self) -> Arc<dyn Stop> {
        self.shared.clone()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.order.is_empty() {
            let count = self.order.len();
            self.abort(&format!("it left while {count} of its calls were outstanding"));
        }
        self.shared.flush(LEAVING);
    }
}
