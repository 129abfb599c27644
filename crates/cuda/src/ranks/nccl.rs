//! Ranks that have a GPU each exchange by NCCL.
//!
//! Collectives go through it, from one GPU's memory to another's; messages between stages of a pipeline go
//! through the host's memory, by the transport that the ranks came with: NCCL's sends wait for their receivers
//! on the stream, in an order that all ranks must agree on, which schedules do not have. What is
//! wrong with a call is not checked here: a rank that does not take part lets the others wait until the launcher
//! of their processes ends them.

mod exchange;
mod line;

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_call::MemoryKind;
use phalanx_comm::{
    Algorithm, Busy, Call, Collectives, CommError, Communicator, Group, GroupId, Handle, OpKind,
    Stop, Traffic,
};
use phalanx_sys::Arena;

use crate::device::{Device, Stream};
use crate::engine::MEMORY;
use crate::error::CudaError;
use crate::libraries::{Nccl, UniqueId};
use exchange::Steps;
use line::{Buffers, Line, new_id};

/// The version of NCCL on this machine, as a number above zero; zero if there is none.
pub(super) fn version() -> i32 {
    let mut version = 0;
    match Nccl::get() {
        // SAFETY: the out-pointer is valid.
        Ok(table) if unsafe { (table.ncclGetVersion)(&mut version) } == 0 => version,
        _ => 0,
    }
}

/// A rank's endpoint whose collectives go through NCCL, on streams beside the engine's.
pub(super) struct NcclEndpoint {
    /// By group.
    lines: HashMap<GroupId, Line>,
    /// Groups by the numbers of handles.
    groups: Vec<GroupId>,
    /// Through which ranks meet and send messages.
    host: Box<dyn Communicator>,
    device: Arc<Device>,
    /// The engine's stream.
    stream: Arc<Stream>,
    traffic: Traffic,
}

/// Set in the handles of calls on lines; others are those of the host's transport.
const LINE: u32 = 1 << 31;

impl NcclEndpoint {
    pub(super) fn new(
        host: Box<dyn Communicator>,
        device: &Arc<Device>,
        stream: &Arc<Stream>,
    ) -> Result<Self, CommError> {
        let (device, stream) = (device.clone(), stream.clone());
        let (lines, groups, traffic) = (HashMap::new(), Vec::new(), Traffic::default());
        let mut made = Self { lines, groups, host, device, stream, traffic };
        made.line(GroupId::WORLD)?;
        Ok(made)
    }

    /// Makes the line of a group; all members do it at the same point of their calls.
    fn line(&mut self, id: GroupId) -> Result<(), CommError> {
        let group = self.host.members(id).clone();
        let me = group.index_of(self.host.rank()).unwrap_or(0);
        let line = match group.len() {
            1 => Line::alone(&self.device),
            places => {
                let made = if me == 0 { new_id() } else { Ok(UniqueId([0; 128])) };
                let made = made.map_err(|error| self.refused(&group, &error))?;
                let word = |i: usize| std::array::from_fn(|j| made.0[4 * i + j]);
                let mut words: Vec<i32> = (0..32).map(|i| i32::from_ne_bytes(word(i))).collect();
                self.host.broadcast(id, 0, &mut words)?;
                let mut bytes = words.into_iter().flat_map(i32::to_ne_bytes);
                let shared = UniqueId(std::array::from_fn(|_| bytes.next().unwrap_or(0)));
                Line::new(&self.device, shared, [places, me])
            }
        };
        self.lines.insert(id, line.map_err(|error| self.refused(&group, &error))?);
        self.groups.push(id);
        Ok(())
    }

    fn refused(&self, group: &Group, error: &CudaError) -> CommError {
        let what = format!("rank {} connects to group {group}", self.host.rank());
        CommError::System { what, error: error.to_string() }
    }

    fn failed(&self, call: &Call<'_>, error: &CudaError) -> CommError {
        let (rank, problem) = (self.host.rank(), error.to_string());
        CommError::BadCall { kind: call.op.kind(), site: call.site, rank, problem }
    }
}

impl Communicator for NcclEndpoint {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn world(&self) -> usize {
        self.host.world()
    }

    /// Of collectives; messages move the host's.
    fn memory(&self) -> MemoryKind {
        MEMORY
    }

    fn arena(&mut self, bytes: usize) -> Result<Option<Arena>, CommError> {
        self.host.arena(bytes)
    }

    fn group(&mut self, group: &Group) -> Result<GroupId, CommError> {
        let id = self.host.group(group)?;
        if !self.lines.contains_key(&id) {
            self.line(id)?;
        }
        Ok(id)
    }

    fn members(&self, id: GroupId) -> &Group {
        self.host.members(id)
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
        let group = self.host.members(call.group);
        let (n, me) = (group.len(), group.index_of(self.host.rank()).unwrap_or(0));
        let Some(steps) = Steps::of(call, n, me) else {
            // SAFETY: the caller's; messages are given the host's memory, and a barrier none.
            return unsafe { self.host.start(call, send, receive) };
        };
        let buffers = Buffers { given: send as u64, wanted: receive as u64 };
        let Some(line) = self.lines.get_mut(&call.group) else {
            return Err(CommError::UnknownHandle { rank: self.host.rank() });
        };
        // SAFETY: the caller's.
        let moved = unsafe { line.start(call, &steps, buffers, &self.stream) };
        let moved = moved.map_err(|error| self.failed(call, &error))?;
        self.traffic.count(call.tag, call.op.kind(), moved as u64);
        let number = self.groups.iter().position(|id| *id == call.group).unwrap_or(0);
        Ok(Handle::new(LINE | number as u32))
    }

    fn wait(&mut self, handle: Handle) -> Result<(), CommError> {
        if handle.number() & LINE == 0 {
            self.host.wait(handle)?;
            for kind in [OpKind::Send, OpKind::Receive] {
                self.traffic.copy_kind(self.host.traffic(), kind);
            }
            return Ok(());
        }
        let unknown = CommError::UnknownHandle { rank: self.host.rank() };
        let group = self.groups.get((handle.number() & !LINE) as usize);
        let line = group.and_then(|id| self.lines.get(id)).ok_or(unknown)?;
        line.end(&self.stream).map_err(|error| CommError::System {
            what: format!("rank {} waits for a collective", self.host.rank()),
            error: error.to_string(),
        })
    }

    fn test(&mut self, handle: &Handle) -> Result<bool, CommError> {
        // What is on a stream comes before what is issued later.
        if handle.number() & LINE == 0 { self.host.test(handle) } else { Ok(true) }
    }

    fn progress(&mut self) -> Result<(), CommError> {
        self.host.progress()
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn reset_traffic(&mut self) {
        self.host.reset_traffic();
        self.traffic = Traffic::default();
    }

    fn busy(&self) -> Busy {
        self.host.busy()
    }

    fn abort(&mut self, message: &str) {
        self.lines.values_mut().for_each(Line::abort);
        self.host.abort(message);
    }

    fn stopper(&self) -> Arc<dyn Stop> {
        self.host.stopper()
    }
}
