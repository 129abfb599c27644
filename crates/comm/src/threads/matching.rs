//! Whether all members of a group called the same thing, found out before anything moves.
//!
//! Every member compares all postings in the same way, so all come to the same verdict.

use std::sync::Arc;

use super::board::{Board, Header, NOBODY};
use crate::call::OpKind;
use crate::error::CommError;

/// Compares what all members have put up as call `sequence`.
///
/// # Safety
/// All members have posted the call, and the caller's own progress is not past it.
pub(super) unsafe fn check(board: &Board, sequence: u64) -> Result<(), CommError> {
    // SAFETY: the caller vouches for all members.
    let header = |member: usize| unsafe { board.posting(member, sequence).header };
    let first = header(0);
    for member in 1..board.len() {
        if !fits(&first, &header(member)) {
            return Err(mismatch(board, sequence, 0, member, String::new()));
        }
    }
    match first.kind {
        OpKind::Permute => check_permute(board, sequence, header),
        // SAFETY: the caller vouches for all members, and all have called the same kind.
        OpKind::AllToAllRagged => unsafe { check_ragged(board, sequence) },
        _ => Ok(()),
    }
}

/// Whether two postings of a call can go together, as far as no other member is concerned.
fn fits(one: &Header, other: &Header) -> bool {
    match (one.kind, other.kind) {
        // The channel of two ranks has its sender first.
        (OpKind::Send, OpKind::Receive) => one.dtype == other.dtype && one.shape == other.shape,
        (OpKind::Send | OpKind::Receive, _) => false,
        (OpKind::Permute, OpKind::Permute) => one.dtype == other.dtype && one.shape == other.shape,
        _ => one == other,
    }
}

/// Whoever gives to a rank must be the one from whom that rank takes.
fn check_permute(
    board: &Board,
    sequence: u64,
    header: impl Fn(usize) -> Header,
) -> Result<(), CommError> {
    for member in 0..board.len() {
        let Header { to, from, .. } = header(member);
        if to != NOBODY && header(to as usize).from != member as u32 {
            let reason = ": what one gives, the other does not take".to_string();
            return Err(mismatch(board, sequence, member, to as usize, reason));
        }
        if from != NOBODY && header(from as usize).to != member as u32 {
            let reason = ": what one takes, the other does not give".to_string();
            return Err(mismatch(board, sequence, member, from as usize, reason));
        }
    }
    Ok(())
}

/// Every pair must agree on how much goes from one to the other.
///
/// # Safety
/// As for [`check`]; all members have called the ragged all-to-all.
unsafe fn check_ragged(board: &Board, sequence: u64) -> Result<(), CommError> {
    for giver in 0..board.len() {
        // SAFETY: the caller vouches for all members.
        let (gives, _) = unsafe { board.ragged(giver, sequence) };
        for (taker, &given) in gives.iter().enumerate() {
            // SAFETY: as above.
            let (_, takes) = unsafe { board.ragged(taker, sequence) };
            if given != takes[giver] {
                let taken = takes[giver];
                let reason = format!(": the first gives {given} rows, the second takes {taken}");
                return Err(mismatch(board, sequence, giver, taker, reason));
            }
        }
    }
    Ok(())
}

#[cold]
fn mismatch(board: &Board, sequence: u64, one: usize, other: usize, reason: String) -> CommError {
    // SAFETY: only called from `check`, whose caller vouches for all members.
    let side =
        |member: usize| unsafe { board.posting(member, sequence).side(&board.group, member) };
    CommError::Mismatch {
        group: Arc::clone(&board.name),
        sequence,
        one: Box::new(side(one)),
        other: Box::new(side(other)),
        reason,
    }
}
