//! Refuses calls that are invalid whatever the other ranks do, before they start.

use crate::call::{Call, CollectiveOp, OpKind};
use crate::error::CommError;
use crate::kernel;
use crate::ragged;
use crate::traffic::TAGS;

/// A rank's place in a group.
#[derive(Clone, Copy)]
pub(crate) struct Member {
    pub(crate) place: usize,
    /// How many members there are.
    pub(crate) of: usize,
}

/// Refuses an invalid call of a rank; `member` is `None` if the endpoint does not know the group.
pub(crate) fn check(
    call: &Call<'_>,
    rank: usize,
    member: Option<Member>,
    send: *const u8,
    receive: *mut u8,
) -> Result<(), CommError> {
    let problem = match member {
        None => Some("this endpoint does not know its group".to_string()),
        Some(member) => problem(call, member, send == receive.cast_const())
            .or_else(|| memory_problem(call, member, send, receive)),
    };
    match problem {
        None => Ok(()),
        Some(problem) => {
            Err(CommError::BadCall { kind: call.op.kind(), site: call.site, rank, problem })
        }
    }
}

/// What is wrong with a call, apart from its memory.
fn problem(call: &Call<'_>, Member { place, of: n }: Member, same: bool) -> Option<String> {
    let peers: [Option<usize>; 2] = match call.op {
        CollectiveOp::Send { to, .. } => [Some(to), None],
        CollectiveOp::Receive { from, .. } => [Some(from), None],
        CollectiveOp::Permute { to, from } => [to, from],
        op => [op.root(), None],
    };
    let outside = peers.into_iter().flatten().find(|&peer| peer >= n);
    let to_itself = matches!(call.op, CollectiveOp::Send { .. } | CollectiveOp::Receive { .. });
    let in_place = same && call.blocks.count() > 0;
    let moves = matches!(call.op, CollectiveOp::AllToAll | CollectiveOp::AllToAllRagged { .. });
    Some(if let Some(peer) = outside {
        format!("place {peer} is not in a group of {n}")
    } else if to_itself && peers[0] == Some(place) {
        "a rank cannot send a message to itself; use permute, which may give a block to its owner"
            .to_string()
    } else if call.op.reduction().is_some() && !kernel::is_reducible(call.dtype) {
        format!("{} cannot be reduced; f64, f32, bf16 and i32 can", call.dtype)
    } else if call.accumulate && call.op.reduction().is_none() {
        "only reductions add to what is there".to_string()
    } else if call.accumulate && in_place {
        "a result cannot be added in place to its own operand".to_string()
    } else if call.op.kind() == OpKind::AllReduce && !call.blocks.is_contiguous() {
        "it needs contiguous elements".to_string()
    } else if moves && in_place && n > 1 {
        "it cannot be done in place".to_string()
    } else if call.tag >= TAGS {
        format!("tag {} is too large; tags are below {TAGS}", call.tag)
    } else {
        return None;
    })
}

/// Missing memory, and lists of counts that do not fit the blocks.
fn memory_problem(
    call: &Call<'_>,
    Member { place, of: n }: Member,
    send: *const u8,
    receive: *mut u8,
) -> Option<String> {
    if let Some(problem) = ragged::problem(call, n) {
        return Some(problem);
    }
    let Some((given, got)) = call.elements(n, place) else {
        return Some("its blocks span more than the address space".to_string());
    };
    let align = call.dtype.size();
    let sides = [(send, given, "to send"), (receive.cast_const(), got, "to receive into")];
    let wrong = sides.into_iter().find(|(pointer, elements, _)| {
        *elements > 0 && (pointer.is_null() || pointer.addr() % align != 0)
    });
    wrong.map(|(_, _, side)| format!("the buffer {side} is missing or not aligned to {align}"))
}
