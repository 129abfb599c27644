//! Which blocks of a call go from which rank to which.

use super::region::Region;
use crate::blocks::{Strides, part};
use crate::call::OpKind;
use crate::header::Header;
use crate::kernel::Place;

/// A call from the view of one member.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) header: &'a Header,
    /// How many members there are.
    pub(super) n: usize,
    /// This rank's place.
    pub(super) me: usize,
    pub(super) send: *const u8,
    pub(super) receive: *mut u8,
    pub(super) source: Strides,
    pub(super) target: Strides,
    /// For ragged calls: the counts sent to all members, then those received from them.
    pub(super) counts: &'a [usize],
}

impl Plan<'_> {
    /// The block that goes from here to a member; for itself, the block that it keeps.
    pub(super) fn given(&self, member: usize) -> Option<Region> {
        let (me, root) = (self.me, self.header.to as usize);
        let block = match self.header.kind {
            OpKind::AllReduce => return Some(self.part(self.send.cast_mut(), member)),
            OpKind::AllToAllRagged => return Some(self.rows(true, member)),
            OpKind::AllGather => 0,
            OpKind::AllToAll | OpKind::ReduceScatter => member,
            OpKind::Broadcast if me == root => 0,
            OpKind::Scatter if me == root => member,
            OpKind::Reduce | OpKind::Gather | OpKind::Permute if member == root => 0,
            // The channel of two ranks has its sender first.
            OpKind::Send if member == 1 => 0,
            _ => return None,
        };
        let place = Place::of(self.send.cast_mut(), self.source, block, self.size());
        Some(Region::new(place, self.block()))
    }

    /// Where a block from a member goes that is not reduced.
    pub(super) fn taken(&self, member: usize) -> Option<Region> {
        let (me, root, from) = (self.me, self.header.to as usize, self.header.from as usize);
        let block = match self.header.kind {
            OpKind::AllToAllRagged => return Some(self.rows(false, member)),
            OpKind::AllGather | OpKind::AllToAll => member,
            OpKind::Gather if me == root => member,
            OpKind::Broadcast | OpKind::Scatter if member == root => 0,
            OpKind::Permute if member == from => 0,
            OpKind::Receive if member == 0 => 0,
            _ => return None,
        };
        let place = Place::of(self.receive, self.target, block, self.size());
        Some(Region::new(place, self.block()))
    }

    /// Whether this rank reduces blocks of all members.
    pub(super) fn reduces(&self) -> bool {
        match self.header.kind {
            OpKind::AllReduce | OpKind::ReduceScatter => true,
            OpKind::Reduce => self.header.to as usize == self.me,
            _ => false,
        }
    }

    /// `outer`, `rows` and elements of the block that this rank reduces.
    pub(super) fn reduced_shape(&self) -> [usize; 3] {
        match self.header.kind {
            OpKind::AllReduce => [1, 1, part(self.header.count(), self.n, self.me).len()],
            _ => self.header.shape,
        }
    }

    /// Where its reduced block goes.
    pub(super) fn reduced_into(&self) -> Place {
        match self.header.kind {
            OpKind::AllReduce => self.result(self.me).place,
            _ => Place::of(self.receive, self.target, 0, self.size()),
        }
    }

    /// Where the part of an `all_reduce` that a member has reduced is stored.
    pub(super) fn result(&self, member: usize) -> Region {
        self.part(self.receive, member)
    }

    /// Whether a sender sends extra bytes to a receiver, in tests of the counters: one sender for
    /// each receiver.
    pub(super) fn gives_more(&self, giver: usize, taker: usize) -> bool {
        match self.header.kind {
            OpKind::Broadcast | OpKind::Scatter | OpKind::Permute => true,
            OpKind::Send | OpKind::Receive => true,
            _ => giver == (taker + 1) % self.n,
        }
    }

    fn size(&self) -> usize {
        self.header.dtype.size()
    }

    fn block(&self) -> [usize; 3] {
        let [outer, rows, len] = self.header.shape;
        [outer, rows, len * self.size()]
    }

    /// A member's part of an `all_reduce`.
    fn part(&self, base: *mut u8, member: usize) -> Region {
        let part = part(self.header.count(), self.n, member);
        Region::flat(base.wrapping_add(part.start * self.size()), part.len() * self.size())
    }

    /// The rows of a ragged call that go to a member, or come from it.
    fn rows(&self, gives: bool, member: usize) -> Region {
        let (given, taken) = self.counts.split_at(self.n);
        let (counts, base) =
            if gives { (given, self.send.cast_mut()) } else { (taken, self.receive) };
        let unit = self.header.shape[2] * self.size();
        let before: usize = counts[..member].iter().sum();
        Region::flat(base.wrapping_add(before * unit), counts[member] * unit)
    }
}
