//! Where the members of a group post their calls, for the others to read.
//!
//! Every member has a ring of slots, one for each of its outstanding calls, and one number that
//! counts its finished calls. Only this member writes them. A slot is read by others only between
//! its stamp, which is set last, and the writer's next use of it, which waits until all members
//! have finished the call. Stamps and progress are sequentially consistent with the flags of
//! sleepers, so that either the sleeper sees the change or the other rank sees the sleeper. So
//! there are no locks, and a call costs each rank one cache line per peer to match.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::entries::{self, Key, Publisher};
use super::wall::{Origin, Wall};
use crate::blocks::Strides;
use crate::call::{Call, CollectiveOp};
use crate::device::CallNote;
use crate::error::{CommError, Side};
use crate::group::Group;
use crate::header::Header;
use crate::matching::{Called, GroupCall};
use crate::ragged::totals;
use crate::site::Site;
use crate::sync::{AtomicU64, Ordering};

/// What a member posts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posting {
    pub(super) header: Header,
    pub(super) source: Strides,
    /// The spots of both buffers.
    pub(super) send: u64,
    pub(super) receive: u64,
    /// As the member numbers sites.
    pub(super) site: u32,
}

impl Posting {
    /// The posting of a call.
    pub(super) fn of(call: &Call<'_>, send: u64, receive: u64) -> Self {
        let header = Header::of(call);
        Self { header, source: call.blocks.source, send, receive, site: call.site.id() }
    }

    /// Bytes of a block.
    pub(super) fn bytes(&self) -> usize {
        self.header.count() * self.header.dtype.size()
    }
}

/// The rings of all members of a group, as one of them sees them.
pub(super) struct Board {
    pub(super) group: Group,
    /// The group as text.
    pub(super) name: Arc<str>,
    /// The entry of this member's ring, by which others find the group's name.
    pub(super) id: u64,
    channel: Option<u32>,
    /// How many calls of a member can be outstanding; a power of two.
    depth: u64,
    /// Null until the member's ring was found.
    rings: Box<[Cell<*const Ring>]>,
    /// For each member the last entry of its list that was looked at.
    looked: Box<[Cell<u64>]>,
    origin: Origin,
    wall: Arc<Wall>,
}

impl Board {
    /// Publishes this rank's ring.
    pub(super) fn new(
        wall: Arc<Wall>,
        own: &mut Publisher,
        group: Group,
        channel: Option<u32>,
    ) -> Result<Self, CommError> {
        let key = Key { group: &group, channel };
        let depth = wall.head().depth;
        let (id, ring) = own.ring(&wall, key, depth as usize)?;
        let name = key.name().into();
        let found =
            |&rank: &usize| if rank == own.rank { ring.as_ptr().cast_const() } else { NOT_FOUND };
        let rings = group.ranks().iter().map(found).map(Cell::new).collect();
        let looked = group.ranks().iter().map(|_| Cell::new(0)).collect();
        let origin = wall.origin;
        Ok(Self { group, name, id, channel, depth, rings, looked, origin, wall })
    }

    pub(super) fn len(&self) -> usize {
        self.rings.len()
    }

    pub(super) fn depth(&self) -> u64 {
        self.depth
    }

    /// Posts call `sequence` of member `me`.
    ///
    /// # Safety
    /// Only the endpoint of member `me` may call this, with consecutive numbers, and only when all
    /// members have finished call `sequence - depth`.
    pub(super) unsafe fn post(
        &self,
        me: usize,
        sequence: u64,
        posting: Posting,
        op: CollectiveOp<'_>,
        note: Option<&CallNote>,
    ) {
        let slot = self.slot(me, sequence);
        // SAFETY: no other rank writes, and by the caller's guarantee none reads any more. The ring
        // has room for two counts for each member, and for a note.
        unsafe {
            (*slot.posting.get()).write(posting);
            if let CollectiveOp::AllToAllRagged { send, receive, .. } = op {
                let (counts, n) = (self.counts(me, sequence), self.len());
                let both = totals(send, n).chain(totals(receive, n)).enumerate();
                both.for_each(|(at, total)| counts.add(at).write(total));
            }
            if let Some(note) = note {
                self.note_at(me, sequence).write(*note);
            }
        }
        slot.stamp.store(sequence + 1, Ordering::SeqCst);
    }

    /// Whether a member has posted call `sequence`.
    pub(super) fn has_posted(&self, member: usize, sequence: u64) -> bool {
        self.is_found(member)
            && self.slot(member, sequence).stamp.load(Ordering::SeqCst) == sequence + 1
    }

    /// What a member has posted.
    ///
    /// # Safety
    /// `has_posted` was true, and the caller's own progress is not past the call.
    pub(super) unsafe fn posting(&self, member: usize, sequence: u64) -> &Posting {
        // SAFETY: the writer wrote it before the stamp, and writes again only after we have
        // finished the call.
        unsafe { (*self.slot(member, sequence).posting.get()).assume_init_ref() }
    }

    /// What a member has posted, for messages.
    ///
    /// # Safety
    /// As for `posting`.
    pub(super) unsafe fn side(&self, member: usize, sequence: u64) -> Side {
        // SAFETY: the caller guarantees the posting.
        let posting = unsafe { self.posting(member, sequence) };
        posting.header.side(&self.group, member, self.site(member, posting.site))
    }

    /// How much a member sends to all members and receives from them.
    ///
    /// # Safety
    /// As for `posting`; and the posting is of a ragged call.
    pub(super) unsafe fn ragged(&self, member: usize, sequence: u64) -> (&[usize], &[usize]) {
        // SAFETY: as for the posting.
        let counts =
            unsafe { std::slice::from_raw_parts(self.counts(member, sequence), 2 * self.len()) };
        counts.split_at(self.len())
    }

    /// What a member has noted about its call.
    ///
    /// # Safety
    /// As for `posting`; and the member posted a note.
    pub(super) unsafe fn note(&self, member: usize, sequence: u64) -> &CallNote {
        // SAFETY: as for the posting.
        unsafe { &*self.note_at(member, sequence) }
    }

    /// Compares what all members have posted as call `sequence`.
    ///
    /// # Safety
    /// All members have posted the call, and the caller's own progress is not past it.
    pub(super) unsafe fn check(&self, sequence: u64) -> Result<(), CommError> {
        let meeting = GroupCall { group: &self.group, name: &self.name, sequence };
        meeting.check(&Posted { board: self, sequence })
    }

    /// How many calls a member has finished: it touches no other memory for them any more.
    pub(super) fn progress(&self, member: usize) -> u64 {
        if self.is_found(member) { self.ring(member).progress.load(Ordering::SeqCst) } else { 0 }
    }

    /// Sets how many calls member `me` has finished.
    pub(super) fn set_progress(&self, me: usize, progress: u64) {
        self.ring(me).progress.store(progress, Ordering::SeqCst);
    }

    /// Where this rank sees a spot that a member has posted.
    #[inline(always)]
    pub(super) fn at(&self, spot: u64) -> *mut u8 {
        self.origin.at(spot)
    }

    fn site(&self, member: usize, id: u32) -> Site {
        entries::site(&self.wall, self.group.ranks()[member], id)
    }

    /// Whether a member's ring is known; looks for it if not.
    #[inline(always)]
    fn is_found(&self, member: usize) -> bool {
        !self.rings[member].get().is_null() || self.look_for(member)
    }

    #[cold]
    fn look_for(&self, member: usize) -> bool {
        let (rank, looked) = (self.group.ranks()[member], &self.looked[member]);
        let key = Key { group: &self.group, channel: self.channel };
        match entries::find_ring(&self.wall, rank, key, looked.get()) {
            Ok(ring) => self.rings[member].set(ring.as_ptr()),
            Err(last) => looked.set(last),
        }
        !self.rings[member].get().is_null()
    }

    /// The ring of a member, which was found before.
    #[inline(always)]
    fn ring(&self, member: usize) -> &Ring {
        let ring = self.rings[member].get();
        debug_assert!(!ring.is_null(), "the ring of member {member} was not found yet");
        // SAFETY: callers have found it, and what was published lives as long as the wall.
        unsafe { &*ring }
    }

    #[inline(always)]
    fn slot(&self, member: usize, sequence: u64) -> &Slot {
        let at = (sequence & (self.depth - 1)) as usize;
        // SAFETY: this many slots follow the ring.
        unsafe { &*(&raw const *self.ring(member)).add(1).cast::<Slot>().add(at) }
    }

    /// The counts of a slot; they follow all slots.
    fn counts(&self, member: usize, sequence: u64) -> *mut usize {
        let at = (sequence & (self.depth - 1)) as usize;
        let slots: *const Slot = (&raw const *self.ring(member)).wrapping_add(1).cast();
        let counts: *const usize = slots.wrapping_add(self.depth as usize).cast();
        counts.wrapping_add(at * 2 * self.len()).cast_mut()
    }

    /// The note of a slot; notes follow all counts.
    fn note_at(&self, member: usize, sequence: u64) -> *mut CallNote {
        let (at, end) = ((sequence & (self.depth - 1)) as usize, self.depth);
        let notes: *mut CallNote =
            self.counts(member, 0).wrapping_add(end as usize * 2 * self.len()).cast();
        notes.wrapping_add(at)
    }
}

const NOT_FOUND: *const Ring = std::ptr::null();

/// One member's calls: slots follow it, then for each slot room for the counts of a ragged call, then for each
/// a note. Two cache lines, because processors fetch them in pairs.
#[repr(C, align(128))]
pub(super) struct Ring {
    progress: AtomicU64,
}

#[repr(C, align(128))]
pub(super) struct Slot {
    /// One more than the number of the call it holds; 0 before the first.
    stamp: AtomicU64,
    posting: UnsafeCell<MaybeUninit<Posting>>,
}

impl Ring {
    /// Bytes of a ring of this many slots for a group of `n`; `None` if there is no such number.
    pub(super) fn bytes(depth: usize, n: usize) -> Option<usize> {
        let counts = n.checked_mul(2 * size_of::<usize>())?;
        let slot = size_of::<Slot>().checked_add(counts)?.checked_add(size_of::<CallNote>())?;
        depth.checked_mul(slot)?.checked_add(size_of::<Self>())
    }

    /// Writes a new ring of this many slots.
    ///
    /// # Safety
    /// There is room for it, aligned and zeroed, which nobody else uses.
    pub(super) unsafe fn write(ring: NonNull<Ring>, depth: usize) {
        // SAFETY: the caller guarantees room for the ring and its slots.
        unsafe {
            ring.write(Self { progress: AtomicU64::new(0) });
            let slots: NonNull<Slot> = ring.add(1).cast();
            (0..depth).for_each(|at| slots.add(at).write(Slot::new()));
        }
    }
}

impl Slot {
    fn new() -> Self {
        let posting = UnsafeCell::new(MaybeUninit::uninit());
        Self { stamp: AtomicU64::new(0), posting }
    }
}

/// A call that all members have posted, and that the caller of [`Board::check`] has not finished.
struct Posted<'a> {
    board: &'a Board,
    sequence: u64,
}

impl Called for Posted<'_> {
    fn header(&self, member: usize) -> &Header {
        // SAFETY: only made by `check`, whose caller guarantees all members.
        unsafe { &self.board.posting(member, self.sequence).header }
    }

    fn site(&self, member: usize) -> Site {
        // SAFETY: as above.
        self.board.site(member, unsafe { self.board.posting(member, self.sequence).site })
    }

    fn ragged(&self, member: usize) -> (&[usize], &[usize]) {
        // SAFETY: as above; it is only asked for if all have called the ragged all-to-all.
        unsafe { self.board.ragged(member, self.sequence) }
    }
}
