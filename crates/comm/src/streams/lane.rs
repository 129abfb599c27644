//! Groups and channels as one rank knows them, and calls that other members announced early.

use std::sync::Arc;

use crate::group::Group;
use crate::header::Header;
use crate::site::Site;

/// What a member called.
#[derive(Clone, Debug)]
pub(super) struct Announced {
    pub(super) header: Header,
    pub(super) site: Site,
    /// For ragged calls: how much is sent to each member, then how much is received.
    pub(super) counts: Vec<usize>,
    /// What it gives this rank, if that came before it could be stored.
    pub(super) block: Vec<u8>,
}

/// A group, or a channel between two ranks, in which calls are numbered.
pub(super) struct Lane {
    pub(super) group: Group,
    /// The channel, if it is one between two ranks.
    pub(super) channel: Option<u32>,
    /// The group as text.
    pub(super) name: Arc<str>,
    /// This rank's place in it.
    pub(super) me: usize,
    /// Calls started so far.
    pub(super) started: u64,
    /// For each member: whether it knows this rank's number for the group.
    pub(super) named: Vec<bool>,
    /// The calls of this rank that have not ended: their numbers, and places in the list of calls.
    pub(super) open: Vec<(u64, u32)>,
    /// Calls that members have started before this rank: the member, the sequence number, the call.
    early: Vec<(usize, u64, Announced)>,
}

impl Lane {
    pub(super) fn new(group: Group, channel: Option<u32>, me: usize) -> Self {
        let name = match (channel, group.ranks()) {
            (Some(channel), [from, to]) => format!("{from}->{to} (channel {channel})"),
            _ => group.to_string(),
        };
        let named = vec![false; group.len()];
        let (open, early) = (Vec::new(), Vec::new());
        Self { group, channel, name: name.into(), me, started: 0, named, open, early }
    }

    /// The place in the list of calls of a call that has not ended.
    pub(super) fn find(&self, sequence: u64) -> Option<u32> {
        self.open.iter().find(|(number, _)| *number == sequence).map(|(_, call)| *call)
    }

    /// Keeps an announced call until this rank starts it.
    pub(super) fn keep(&mut self, member: usize, sequence: u64, announced: Announced) {
        self.early.push((member, sequence, announced));
    }

    /// The announcement of a call that a member has started before this rank.
    pub(super) fn early(&mut self, member: usize, sequence: u64) -> Option<&mut Announced> {
        let found = |call: &&mut (usize, u64, Announced)| (call.0, call.1) == (member, sequence);
        self.early.iter_mut().find(found).map(|(_, _, announced)| announced)
    }

    /// An announcement of a call that came before it was started here.
    pub(super) fn take_early(&mut self, sequence: u64) -> Option<(usize, Announced)> {
        let at = self.early.iter().position(|(_, number, _)| *number == sequence)?;
        let (member, _, announced) = self.early.swap_remove(at);
        Some((member, announced))
    }
}
