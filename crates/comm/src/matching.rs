//! Checks that all members of a group made the same call, before any data move.
//!
//! Every member compares the calls of all members in the same way, so all get the same result.

use std::sync::Arc;

use crate::call::OpKind;
use crate::error::CommError;
use crate::group::Group;
use crate::header::{Header, NOBODY};
use crate::site::Site;

/// What all members have called, by their place in the group.
pub(crate) trait Called {
    /// What a member called.
    fn header(&self, member: usize) -> &Header;
    /// Where it called it.
    fn site(&self, member: usize) -> Site;
    /// For a ragged call: how much it sends to each member, and how much it receives.
    fn ragged(&self, member: usize) -> (&[usize], &[usize]);
}

/// A call of a group, for messages about it.
#[derive(Clone, Copy)]
pub(crate) struct GroupCall<'a> {
    pub(crate) group: &'a Group,
    /// The group as text.
    pub(crate) name: &'a Arc<str>,
    /// The index of the call in its group.
    pub(crate) sequence: u64,
}

impl GroupCall<'_> {
    /// Compares what all members have called.
    pub(crate) fn check(&self, called: &impl Called) -> Result<(), CommError> {
        let first = called.header(0);
        for member in 1..self.group.len() {
            if !fits(first, called.header(member)) {
                return Err(self.mismatch(called, 0, member, String::new()));
            }
        }
        match first.kind {
            OpKind::Permute => self.check_permute(called),
            OpKind::AllToAllRagged => self.check_ragged(called),
            _ => Ok(()),
        }
    }

    /// A rank must receive from the rank that sends to it.
    fn check_permute(&self, called: &impl Called) -> Result<(), CommError> {
        for member in 0..self.group.len() {
            let Header { to, from, .. } = *called.header(member);
            if to != NOBODY && called.header(to as usize).from != member as u32 {
                let reason = ": one sends a block that the other does not receive".to_string();
                return Err(self.mismatch(called, member, to as usize, reason));
            }
            if from != NOBODY && called.header(from as usize).to != member as u32 {
                let reason = ": one receives a block that the other does not send".to_string();
                return Err(self.mismatch(called, member, from as usize, reason));
            }
        }
        Ok(())
    }

    /// Every pair must agree on how much goes from one to the other.
    fn check_ragged(&self, called: &impl Called) -> Result<(), CommError> {
        for giver in 0..self.group.len() {
            let (gives, _) = called.ragged(giver);
            for (taker, &given) in gives.iter().enumerate() {
                let taken = called.ragged(taker).1[giver];
                if given != taken {
                    let reason =
                        format!(": the first sends {given} rows, but the second receives {taken}");
                    return Err(self.mismatch(called, giver, taker, reason));
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn mismatch(
        &self,
        called: &impl Called,
        one: usize,
        other: usize,
        reason: String,
    ) -> CommError {
        let side =
            |member| Box::new(called.header(member).side(self.group, member, called.site(member)));
        CommError::Mismatch {
            group: Arc::clone(self.name),
            sequence: self.sequence,
            one: side(one),
            other: side(other),
            reason,
        }
    }
}

/// Whether the calls of two members match.
fn fits(one: &Header, other: &Header) -> bool {
    match (one.kind, other.kind) {
        // The channel of two ranks has its sender first.
        (OpKind::Send, OpKind::Receive) => one.dtype == other.dtype && one.shape == other.shape,
        (OpKind::Send | OpKind::Receive, _) => false,
        (OpKind::Permute, OpKind::Permute) => one.dtype == other.dtype && one.shape == other.shape,
        _ => one == other,
    }
}
