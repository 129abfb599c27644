//! Which blocks a rank reads for a call, and from which ranks.
//!
//! Ranks pull: a rank reads the others' memory and writes its own. Only `all_reduce` also pushes: a
//! rank reduces its part and writes it to all ranks, which saves one pass over memory and one
//! synchronisation compared with reading the reduced parts. Copies begin with the next member of
//! the group, so that not all read the same memory at once; reductions always go through the group
//! in its order, from which their bits follow.

use super::board::{Board, Posting};
use crate::blocks::{Strides, part};
use crate::call::{OpKind, ReduceOp};
use crate::device::{Combining, DeviceMover, Reached, StridedRows};
use crate::header::NOBODY;
use crate::kernel::{self, Combine, Meter, Place, Pointers};
use crate::ragged::{Cells, Run};

/// From this size on, results are written with streaming stores. Smaller results are soon read from
/// a cache, and streamed ones would have to come back from memory.
const STREAMED_BYTES: usize = 16 << 10;

/// Lists with one entry per rank, so that no call allocates.
#[derive(Default)]
pub(super) struct Scratch {
    sources: Vec<Place>,
    targets: Vec<Place>,
    pointers: Pointers,
    /// The calls of all members, if they move a device's memory; this rank's own has no entry that is used.
    pub(super) reached: Vec<Reached>,
    rows: Vec<StridedRows>,
}

/// The part of one call that one member does.
pub(super) struct Movement<'a> {
    pub(super) board: &'a Board,
    pub(super) me: usize,
    pub(super) sequence: u64,
    pub(super) own: &'a Posting,
    pub(super) target: Strides,
    /// Of a ragged call: what is received.
    pub(super) cells: &'a Cells,
    pub(super) scratch: &'a mut Scratch,
    /// Whether every member runs on its own core.
    pub(super) stream: bool,
    pub(super) meter: Meter,
    /// Who moves memory that the processor cannot address.
    pub(super) device: Option<&'a mut dyn DeviceMover>,
    /// What the device said first if it failed.
    pub(super) failed: Option<String>,
}

impl Movement<'_> {
    /// Does this member's part of the call.
    ///
    /// # Safety
    /// All members have posted the call, they match, and no member leaves it before this member has
    /// reported that it finished.
    pub(super) unsafe fn run(&mut self) {
        let me = self.me;
        let header = self.own.header;
        let root = header.to as usize;
        // SAFETY: the caller guarantees all members' memory.
        unsafe {
            match header.kind {
                OpKind::AllReduce => self.reduce_part(),
                OpKind::AllGather => self.copy_from_all(|_| 0),
                OpKind::AllToAll => self.copy_from_all(|_| me),
                OpKind::AllToAllRagged => self.copy_ragged(),
                OpKind::ReduceScatter => self.reduce_blocks(me),
                OpKind::Reduce if me == root => self.reduce_blocks(0),
                OpKind::Gather if me == root => self.copy_from_all(|_| 0),
                OpKind::Broadcast => self.copy(root, 0, 0),
                OpKind::Scatter => self.copy(root, me, 0),
                OpKind::Permute if header.from != NOBODY => self.copy(header.from as usize, 0, 0),
                OpKind::Receive => self.copy(0, 0, 0),
                OpKind::Reduce | OpKind::Gather | OpKind::Permute => {}
                OpKind::Send | OpKind::Barrier => {}
            }
        }
    }

    /// Reads 64 extra bytes of a peer's memory, which a test of the counters must detect.
    ///
    /// # Safety
    /// As for [`Movement::run`], which has read something from a peer.
    pub(super) unsafe fn copy_planted(&mut self) {
        let header = &self.own.header;
        let peer = match header.kind {
            OpKind::Broadcast | OpKind::Scatter => header.to as usize,
            OpKind::Permute => header.from as usize,
            OpKind::Receive => 0,
            _ => (self.me + 1) % self.board.len(),
        };
        let row = header.shape[2] * self.size();
        // SAFETY: the caller guarantees the peer's memory.
        let [send, _] = unsafe { self.buffers(peer) };
        let mut room = [0u8; 64];
        let spare = self.device.as_mut().and_then(|device| device.spare().ok());
        let (base, mut done) = (spare.unwrap_or(room.as_mut_ptr()), 0);
        while done < room.len() {
            let len = row.min(room.len() - done);
            let from = Place { base: send, outer: 0, row: 0, foreign: true };
            let to = Place { base: base.wrapping_add(done), outer: 0, row: 0, foreign: false };
            // SAFETY: `len` bytes are in the peer's first row, and left in the room.
            unsafe { self.move_rows([1, 1, len], from, to) };
            done += len;
        }
        std::hint::black_box(room);
    }

    fn size(&self) -> usize {
        self.own.header.dtype.size()
    }

    /// Where a member's buffers are; on a device they are ready for what is issued from here on.
    ///
    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn buffers(&mut self, member: usize) -> [*mut u8; 2] {
        if let Some(device) = self.device.as_mut().filter(|_| member != self.me) {
            let Reached { send, receive, begin, .. } = self.scratch.reached[member];
            let ready = device.after(begin);
            self.keep(ready);
            return [send, receive];
        }
        // SAFETY: the caller guarantees the posting.
        let posting = unsafe { self.board.posting(member, self.sequence) };
        [self.board.at(posting.send), self.board.at(posting.receive)]
    }

    /// Where a member's block `block` lies.
    ///
    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn source(&mut self, member: usize, block: usize) -> Place {
        // SAFETY: the caller guarantees the posting.
        let ([base, _], posting) =
            unsafe { (self.buffers(member), self.board.posting(member, self.sequence)) };
        Place { foreign: member != self.me, ..Place::of(base, posting.source, block, self.size()) }
    }

    /// Keeps the first failure of the device.
    fn keep(&mut self, done: Result<(), String>) {
        self.failed = self.failed.take().or(done.err());
    }

    /// Copies rows of bytes, and counts them.
    ///
    /// # Safety
    /// As for [`kernel::copy`].
    unsafe fn move_rows(&mut self, shape: [usize; 3], from: Place, to: Place) {
        let Some(device) = &mut self.device else {
            // SAFETY: the caller's promises are passed on.
            unsafe { kernel::copy(shape, from, to, &mut self.meter) };
            return;
        };
        let Some(shape) = kernel::to_copy(shape, from, to) else { return };
        // SAFETY: the caller's promises are passed on; what belongs to others is ready.
        let done = unsafe { device.copy(shape, from.rows(), to.rows()) };
        self.keep(done);
        let foreign = from.foreign || to.foreign;
        self.meter.bytes += if foreign { shape.iter().product::<usize>() as u64 } else { 0 };
    }

    fn target(&self, block: usize) -> Place {
        Place::of(self.board.at(self.own.receive), self.target, block, self.size())
    }

    /// Copies block `block` of a member to block `to` here.
    ///
    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn copy(&mut self, member: usize, block: usize, to: usize) {
        let [outer, rows, len] = self.own.header.shape;
        let shape = [outer, rows, len * self.size()];
        let to = self.target(to);
        // SAFETY: the caller guarantees both blocks.
        unsafe {
            let from = self.source(member, block);
            self.move_rows(shape, from, to);
        }
    }

    /// Copies one block of every member; the one of member `i` becomes block `i` here.
    ///
    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn copy_from_all(&mut self, block: impl Fn(usize) -> usize) {
        let (n, me) = (self.board.len(), self.me);
        for member in (1..=n).map(|step| (me + step) % n) {
            // SAFETY: the caller guarantees all members' blocks.
            unsafe { self.copy(member, block(member), member) };
        }
    }

    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn copy_ragged(&mut self) {
        let (n, me, size) = (self.board.len(), self.me, self.size());
        let (shape, cells) = (self.own.header.shape, self.cells);
        for member in (1..=n).map(|step| (me + step) % n) {
            // SAFETY: the caller guarantees the posting.
            let (from, to) = (unsafe { self.source(member, me) }, self.target(member));
            for Run { outer, row, column, len } in cells.runs(shape, member, n) {
                let at = |place: Place| {
                    let base = place.at(outer, row).wrapping_add(column * size);
                    Place { base, outer: 0, row: 0, foreign: place.foreign }
                };
                // SAFETY: the caller guarantees both blocks, in which the run lies: no cell has more units than
                // fit into it.
                unsafe { self.move_rows([1, 1, len * size], at(from), at(to)) };
            }
        }
    }

    /// Reduces block `block` of all members into the first block here.
    ///
    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn reduce_blocks(&mut self, block: usize) {
        self.scratch.sources.clear();
        for member in 0..self.board.len() {
            // SAFETY: the caller guarantees all postings.
            let source = unsafe { self.source(member, block) };
            self.scratch.sources.push(source);
        }
        self.scratch.targets.clear();
        self.scratch.targets.push(self.target(0));
        // SAFETY: the caller guarantees all blocks.
        unsafe { self.reduce(self.own.header.shape) };
    }

    /// Reduces this member's part of an `all_reduce` and writes it to all members.
    ///
    /// # Safety
    /// As for [`Movement::run`].
    unsafe fn reduce_part(&mut self) {
        let (n, me) = (self.board.len(), self.me);
        let part = part(self.own.header.count(), n, me);
        let (start, count) = (part.start * self.size(), part.len());
        self.scratch.sources.clear();
        self.scratch.targets.clear();
        for member in 0..n {
            // SAFETY: the caller guarantees all postings.
            let (source, [_, first_target]) =
                unsafe { (self.source(member, 0), self.buffers((me + member) % n)) };
            let base = source.base.wrapping_add(start);
            self.scratch.sources.push(Place { base, ..source });
            // Its own target comes first, because only that one may accumulate.
            let base = first_target.wrapping_add(start);
            self.scratch.targets.push(Place { base, outer: 0, row: 0, foreign: member != 0 });
        }
        // SAFETY: the caller guarantees all blocks, of which these are parts that no other member
        // writes, and that no other member reads if the call is in place.
        unsafe { self.reduce([1, 1, count]) };
    }

    /// # Safety
    /// As for [`kernel::reduce`], of the places in the scratch.
    unsafe fn reduce(&mut self, shape: [usize; 3]) {
        let header = &self.own.header;
        let combine = Combine {
            dtype: header.dtype,
            reduction: header.reduction.unwrap_or(ReduceOp::Sum),
            accumulate: header.accumulate,
            stream: self.stream && shape[2] * self.size() >= STREAMED_BYTES,
        };
        let Scratch { sources, targets, pointers, rows, .. } = &mut *self.scratch;
        let Some(device) = &mut self.device else {
            // SAFETY: the caller's promises are passed on.
            unsafe { kernel::reduce(combine, shape, sources, targets, pointers, &mut self.meter) };
            return;
        };
        rows.clear();
        rows.extend(sources.iter().chain(targets.iter()).map(Place::rows));
        let (from, to) = rows.split_at(sources.len());
        let Combine { dtype, reduction: op, accumulate, .. } = combine;
        // SAFETY: the caller's promises are passed on; what belongs to others is ready.
        let done = unsafe { device.reduce(Combining { dtype, op, accumulate }, shape, from, to) };
        let foreign = sources.iter().chain(targets.iter()).filter(|place| place.foreign).count();
        let bytes = shape.iter().product::<usize>() * dtype.size();
        self.keep(done);
        self.meter.bytes += (foreign * bytes) as u64;
    }
}
