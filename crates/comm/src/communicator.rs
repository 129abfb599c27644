//! What every transport offers: one endpoint per rank, one way to start a call.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_call::MemoryKind;
use phalanx_sys::Arena;

use crate::call::{Call, OpKind};
use crate::device::DeviceMover;
use crate::error::{CommError, Failure};
use crate::group::{Group, GroupId};
use crate::site::Site;
use crate::traffic::Traffic;
use crate::volume::Algorithm;

/// A rank's end of a transport.
///
/// Calls of one group are matched in the order in which each member starts them. Progress happens
/// in `wait`, `test`, `progress` and `take_on`, and after `computes`, over all outstanding calls of the endpoint, so members may
/// wait for them in different orders. After the first error of any rank every call fails.
pub trait Communicator: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// The kind of memory that calls read and write: an engine must compute in the same.
    fn memory(&self) -> MemoryKind;

    /// Zeroed memory that calls need not copy to where other ranks see it: an engine keeps its
    /// buffers there. `None` if all memory of this rank is like that. It must be dropped after the
    /// endpoint, or when no call uses it.
    fn arena(&mut self, bytes: usize) -> Result<Option<Arena>, CommError> {
        let _ = bytes;
        Ok(None)
    }

    /// From now on calls move a device's memory, which this mover reaches. All ranks of the world must do
    /// it at the same point of their calls, with none outstanding. A transport whose ranks cannot reach
    /// each other's memory gives the mover back.
    fn attach(&mut self, mover: Box<dyn DeviceMover>) -> Result<(), Box<dyn DeviceMover>> {
        Err(mover)
    }

    /// Makes a group known; the same group gives the same id. All members must do it, in an order
    /// that is the same wherever two groups share ranks.
    fn group(&mut self, group: &Group) -> Result<GroupId, CommError>;

    /// The ranks of a known group.
    ///
    /// # Panics
    /// If the id is not from this endpoint.
    fn members(&self, id: GroupId) -> &Group;

    /// How this transport does a call, from which its volume follows.
    fn algorithm(&self, call: &Call<'_>) -> Algorithm;

    /// Starts a call: `send` is what is given, `receive` what is received into. A side that the
    /// call does not use on this rank may be null.
    ///
    /// Working in place (`send` and `receive` are the same memory, block for block) is allowed for
    /// `all_reduce`, `reduce`, `broadcast`, and where a rank's own block is in its place already:
    /// `all_gather` and `gather` whose `send` is the own block of `receive`, `reduce_scatter` and
    /// `scatter` whose `receive` is the own block of `send`. Otherwise the two must not overlap.
    ///
    /// # Safety
    /// Until `wait` or `test` reports the end of the call or an error, or the endpoint is dropped:
    /// all elements of the source blocks are initialised and nothing writes them (except this call
    /// itself, in place); all elements of the target blocks are initialised, may be written, and
    /// nothing else touches them; both are aligned for the element type. Every rank of the group
    /// must follow these rules.
    unsafe fn start(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError>;

    /// Says that the rank computes now, and does not call soon: calls that it has started go on meanwhile, if the
    /// transport needs a processor for that.
    fn computes(&mut self) -> Result<(), CommError> {
        Ok(())
    }

    /// Between two computations: takes calls that were started on, as far as nothing has to be waited for. Says
    /// whether anything moved. A transport that moves data meanwhile by itself does nothing.
    fn take_on(&mut self) -> Result<bool, CommError> {
        Ok(false)
    }

    /// Waits for the end of a call; then both buffers are free again.
    fn wait(&mut self, handle: Handle) -> Result<(), CommError>;

    /// Whether a call has ended; the handle must still be waited for.
    fn test(&mut self, handle: &Handle) -> Result<bool, CommError>;

    /// Makes progress on outstanding calls without waiting.
    fn progress(&mut self) -> Result<(), CommError>;

    /// What this rank has read from other ranks and written to them so far.
    fn traffic(&self) -> &Traffic;

    /// Sets the traffic counters to zero.
    fn reset_traffic(&mut self);

    /// How this rank's thread spent its time; must be called on the thread that waits.
    fn busy(&self) -> Busy;

    /// Tells all ranks that this one has failed. Returns when no rank touches its memory any more.
    fn abort(&mut self, message: &str);

    /// A handle that stops all ranks because of this one, for code that no longer has the endpoint.
    fn stopper(&self) -> Arc<dyn Stop>;
}

/// Stops the ranks of a world because of one of them, from outside its endpoint.
pub trait Stop: Send + Sync {
    /// Stops all ranks because this one failed with a message; returns the first failure, which may
    /// be an earlier one.
    fn stop(&self, message: &str) -> Failure;
}

/// Records what a rank calls and whom it waits for. It must not allocate.
pub trait CallWatch: Send + Sync {
    /// The rank has begun a call: the operation, the group's name, its number there, and its site.
    fn began(&self, op: OpKind, group: &str, number: u64, site: Site);

    /// A call has ended.
    fn ended(&self, op: OpKind, group: &str, number: u64, site: Site);

    /// The rank sleeps until another one does something, or does not any more.
    fn waits(&self, rank: Option<usize>);
}

impl fmt::Debug for dyn CallWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallWatch")
    }
}

/// An outstanding call. It is waited for once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a call that is started must be waited for"]
pub struct Handle(pub(crate) u32);

impl Handle {
    /// The handle of the call to which a transport gave this number.
    pub fn new(number: u32) -> Self {
        Self(number)
    }

    /// The number that its transport gave it.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// How a rank's thread spent its time since the thread began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// Processor time without the time spent waiting.
    pub busy: Duration,
    /// Processor time spent in busy waiting.
    pub spinning: Duration,
    /// Wall-clock time spent waiting for others.
    pub waited: Duration,
}
