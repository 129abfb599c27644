//! Blocking calls over slices: safe, because the slices are borrowed until the call ends.

use phalanx_ir::DType;

use crate::blocks::Blocks;
use crate::call::{Call, CollectiveOp, ReduceOp};
use crate::communicator::Communicator;
use crate::element::Element;
use crate::error::CommError;
use crate::group::GroupId;

/// Blocking calls over slices, for every communicator.
///
/// [`Collectives::run`] does any call, with its site, tag, strides and accumulation; the others are
/// short forms over contiguous elements.
pub trait Collectives: Communicator {
    /// Does a call whose elements are of the slices' type. Slices must be as long as the call says
    /// ([`Call::elements`]), at least; a side that it does not use on this rank may be empty.
    fn run<T: Element>(
        &mut self,
        call: &Call<'_>,
        send: &[T],
        receive: &mut [T],
    ) -> Result<(), CommError> {
        check_slices(self, call, T::DTYPE, send.len(), receive.len())?;
        // SAFETY: the slices are as long as the call needs, initialised, aligned for their type, do
        // not overlap, and are borrowed until the call is over: `wait` returns, also with an error,
        // only when no rank touches them any more.
        unsafe { run_raw(self, call, send.as_ptr().cast(), receive.as_mut_ptr().cast()) }
    }

    /// Does a call in place: `all_reduce`, `reduce` or `broadcast`.
    fn run_in_place<T: Element>(
        &mut self,
        call: &Call<'_>,
        buffer: &mut [T],
    ) -> Result<(), CommError> {
        if !matches!(
            call.op,
            CollectiveOp::AllReduce(_)
                | CollectiveOp::Reduce { .. }
                | CollectiveOp::Broadcast { .. }
        ) || call.blocks.source != call.blocks.target
        {
            let problem = "only all_reduce, reduce and broadcast work in place, with equal strides";
            return Err(refused(self, call, problem.to_string()));
        }
        check_slices(self, call, T::DTYPE, buffer.len(), buffer.len())?;
        let buffer: *mut u8 = buffer.as_mut_ptr().cast();
        // SAFETY: as in `run`; these calls may be done in place.
        unsafe { run_raw(self, call, buffer, buffer) }
    }

    /// Replaces the buffer by the reduction of all ranks' buffers.
    fn all_reduce<T: Element>(
        &mut self,
        group: GroupId,
        reduction: ReduceOp,
        buffer: &mut [T],
    ) -> Result<(), CommError> {
        let blocks = Blocks::contiguous(buffer.len());
        let call = Call::new(group, CollectiveOp::AllReduce(reduction), T::DTYPE, blocks);
        self.run_in_place(&call, buffer)
    }

    /// Receives the slices of all ranks, one after the other.
    fn all_gather<T: Element>(
        &mut self,
        group: GroupId,
        send: &[T],
        receive: &mut [T],
    ) -> Result<(), CommError> {
        let call =
            Call::new(group, CollectiveOp::AllGather, T::DTYPE, Blocks::contiguous(send.len()));
        self.run(&call, send, receive)
    }

    /// Receives the reduction of all ranks' `i`th parts, where `i` is this rank's place.
    fn reduce_scatter<T: Element>(
        &mut self,
        group: GroupId,
        reduction: ReduceOp,
        send: &[T],
        receive: &mut [T],
    ) -> Result<(), CommError> {
        let blocks = Blocks::contiguous(receive.len());
        let call = Call::new(group, CollectiveOp::ReduceScatter(reduction), T::DTYPE, blocks);
        self.run(&call, send, receive)
    }

    /// Receives the `i`th part of all ranks, where `i` is this rank's place.
    fn all_to_all<T: Element>(
        &mut self,
        group: GroupId,
        send: &[T],
        receive: &mut [T],
    ) -> Result<(), CommError> {
        let n = self.members(group).len();
        let blocks = Blocks::contiguous(send.len() / n);
        let call = Call::new(group, CollectiveOp::AllToAll, T::DTYPE, blocks);
        if !send.len().is_multiple_of(n) {
            let problem = format!("{} elements cannot be divided into {n} equal parts", send.len());
            return Err(refused(self, &call, problem));
        }
        self.run(&call, send, receive)
    }

    /// Replaces the buffer by that of the root, a place in the group.
    fn broadcast<T: Element>(
        &mut self,
        group: GroupId,
        root: usize,
        buffer: &mut [T],
    ) -> Result<(), CommError> {
        let blocks = Blocks::contiguous(buffer.len());
        let call = Call::new(group, CollectiveOp::Broadcast { root }, T::DTYPE, blocks);
        self.run_in_place(&call, buffer)
    }

    /// Sends a message on channel 0; returns when it was received.
    fn send<T: Element>(&mut self, group: GroupId, to: usize, send: &[T]) -> Result<(), CommError> {
        let op = CollectiveOp::Send { to, channel: 0 };
        let call = Call::new(group, op, T::DTYPE, Blocks::contiguous(send.len()));
        self.run(&call, send, &mut [])
    }

    /// Receives a message on channel 0.
    fn receive<T: Element>(
        &mut self,
        group: GroupId,
        from: usize,
        receive: &mut [T],
    ) -> Result<(), CommError> {
        let op = CollectiveOp::Receive { from, channel: 0 };
        let call = Call::new(group, op, T::DTYPE, Blocks::contiguous(receive.len()));
        self.run(&call, &[], receive)
    }

    /// Returns when all members have come.
    fn barrier(&mut self, group: GroupId) -> Result<(), CommError> {
        let call = Call::new(group, CollectiveOp::Barrier, DType::Bool, Blocks::contiguous(0));
        self.run::<i32>(&call, &[], &mut [])
    }
}

impl<C: Communicator + ?Sized> Collectives for C {}

fn check_slices<C: Communicator + ?Sized>(
    endpoint: &mut C,
    call: &Call<'_>,
    dtype: DType,
    send: usize,
    receive: usize,
) -> Result<(), CommError> {
    let group = endpoint.members(call.group);
    let n = group.len();
    let me = group.index_of(endpoint.rank()).unwrap_or_default();
    let problem = match call.elements(n, me) {
        _ if call.dtype != dtype && call.op != CollectiveOp::Barrier => {
            format!("the call has elements of type {}, but the slices have {dtype}", call.dtype)
        }
        Some((given, got)) if given <= send && got <= receive => return Ok(()),
        Some((given, got)) => format!(
            "it sends {given} elements and receives {got}, but the slices have {send} and {receive}"
        ),
        None => "its blocks span more than the address space".to_string(),
    };
    Err(refused(endpoint, call, problem))
}

/// The error of a call that is refused before it starts; stops all ranks.
fn refused<C: Communicator + ?Sized>(
    endpoint: &mut C,
    call: &Call<'_>,
    problem: String,
) -> CommError {
    let (kind, site, rank) = (call.op.kind(), call.site, endpoint.rank());
    let error = CommError::BadCall { kind, site, rank, problem };
    endpoint.abort(&error.to_string());
    error
}

/// # Safety
/// As for [`Communicator::start`], until this returns.
unsafe fn run_raw<C: Communicator + ?Sized>(
    endpoint: &mut C,
    call: &Call<'_>,
    send: *const u8,
    receive: *mut u8,
) -> Result<(), CommError> {
    // SAFETY: the caller keeps the rules until this returns, and this returns after `wait`.
    let handle = unsafe { endpoint.start(call, send, receive)? };
    endpoint.wait(handle)
}
