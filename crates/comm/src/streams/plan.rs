//! Which blocks of a call go from which rank to which.

use std::ops::Range;

use super::region::{Cut, Region};
use crate::blocks::{Strides, part};
use crate::call::OpKind;
use crate::header::Header;
use crate::kernel::Place;

/// The most bytes of an `all_reduce` between two ranks that goes in one exchange.
const AT_ONCE: usize = 128 << 10;

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
    /// For ragged calls: the bytes to the end of every cell, of what is sent to all members, then of what is received
    /// from them; and the bytes of a cell.
    pub(super) ends: &'a [usize],
    pub(super) cell: usize,
}

impl Plan<'_> {
    /// The block that goes from here to a member; for itself, the block that it keeps.
    pub(super) fn given(&self, member: usize) -> Option<Region> {
        let (me, root) = (self.me, self.header.to as usize);
        let block = match self.header.kind {
            OpKind::AllReduce => return Some(self.part(self.send.cast_mut(), member)),
            OpKind::AllToAllRagged => return Some(self.cells(true, member)),
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
            OpKind::AllToAllRagged => return Some(self.cells(false, member)),
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

    /// Whether an `all_reduce` goes in one exchange: two ranks give each other everything and both reduce it.
    /// That moves as many bytes as parts and their results, with one way less to wait for; but both add
    /// all elements, which takes longer than the way if there are many.
    pub(super) fn at_once(&self) -> bool {
        let bytes = self.header.count() * self.size();
        self.header.kind == OpKind::AllReduce && self.n == 2 && bytes <= AT_ONCE
    }

    /// Whether each member's reduced part goes to all others.
    pub(super) fn sends_results(&self) -> bool {
        self.header.kind == OpKind::AllReduce && !self.at_once()
    }

    /// `outer`, `rows` and elements of the block that this rank reduces.
    pub(super) fn reduced_shape(&self) -> [usize; 3] {
        match self.header.kind {
            OpKind::AllReduce => [1, 1, self.part_of(self.me).len()],
            _ => self.header.shape,
        }
    }

    /// Whether the own block and the result of a reduction are contiguous, so that any piece of them can be
    /// reduced by itself.
    pub(super) fn reduces_dense(&self) -> bool {
        let [outer, rows, len] = self.reduced_shape();
        let shape = [outer, rows, len * self.size()];
        let own = self.given(self.me).is_some_and(|region| region.place.is_dense(shape));
        self.header.kind == OpKind::AllReduce || (own && self.reduced_into().is_dense(shape))
    }

    /// Where its reduced block goes.
    pub(super) fn reduced_into(&self) -> Place {
        match self.header.kind {
            OpKind::AllReduce => self.result(self.me).place,
            _ => Place::of(self.receive, self.target, 0, self.size()),
        }
    }

    /// What an `all_reduce` in one exchange counts for this rank beyond what it receives: with parts and results
    /// it would be twice its own part, and counters do not depend on the way that was taken.
    pub(super) fn uncounted(&self) -> i64 {
        let own = part(self.header.count(), self.n, self.me).len() as i64;
        let size = self.size() as i64;
        if self.at_once() { (2 * own - self.header.count() as i64) * size } else { 0 }
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

    /// The elements of an `all_reduce` that a member reduces.
    fn part_of(&self, member: usize) -> Range<usize> {
        match self.at_once() {
            true => 0..self.header.count(),
            false => part(self.header.count(), self.n, member),
        }
    }

    /// A member's part of an `all_reduce`.
    fn part(&self, base: *mut u8, member: usize) -> Region {
        let part = self.part_of(member);
        Region::flat(base.wrapping_add(part.start * self.size()), part.len() * self.size())
    }

    /// The block of a ragged call that goes to a member, or comes from it.
    fn cells(&self, gives: bool, member: usize) -> Region {
        let cells = self.ends.len() / (2 * self.n);
        let (first, base, strides) = match gives {
            true => (0, self.send.cast_mut(), self.source),
            false => (self.ends.len() / 2, self.receive, self.target),
        };
        let ends = self.ends[first + member * cells..].as_ptr();
        let place = Place::of(base, strides, member, self.size());
        let cut = (cells > 0).then_some(Cut { ends, cells, cell: self.cell });
        Region { place, shape: if cells > 0 { self.block() } else { [0; 3] }, cut }
    }
}
