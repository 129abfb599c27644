//! Where the members of a group post their calls, for the others to read.
//!
//! Every member has a ring of slots, one for each of its outstanding calls, and one number that
//! counts its finished calls. Only this member writes them. A slot is read by others only between
//! its stamp, which is set last, and the writer's next use of it, which waits until all members
//! have finished the call. Stamps and progress are sequentially consistent with the flags of
//! sleepers, so that either the sleeper sees the change or the other rank sees the sleeper. So
//! there are no locks, and a call costs each rank one cache line per peer to match.

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::blocks::Strides;
use crate::call::{Call, CollectiveOp};
use crate::error::{CommError, Side};
use crate::group::Group;
use crate::header::Header;
use crate::matching::{Called, GroupCall};
use crate::site::Site;
use crate::sync::{AtomicU64, Ordering};

/// What a member posts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posting {
    pub(super) header: Header,
    pub(super) source: Strides,
    pub(super) send: *const u8,
    pub(super) receive: *mut u8,
    pub(super) site: Site,
}

impl Posting {
    /// The posting of a call.
    pub(super) fn of(call: &Call<'_>, send: *const u8, receive: *mut u8) -> Self {
        let header = Header::of(call);
        Self { header, source: call.blocks.source, send, receive, site: call.site }
    }

    /// Bytes of a block.
    pub(super) fn bytes(&self) -> usize {
        self.header.count() * self.header.dtype.size()
    }

    /// The same for error messages.
    pub(super) fn side(&self, group: &Group, index: usize) -> Side {
        self.header.side(group, index, self.site)
    }
}

/// The slots of all members of a group.
pub(super) struct Board {
    pub(super) group: Group,
    /// The group as text.
    pub(super) name: Arc<str>,
    /// Its number among the boards of the world.
    pub(super) id: u64,
    /// How many calls of a member can be outstanding; a power of two.
    depth: u64,
    members: Box<[Member]>,
}

/// Two cache lines, because processors fetch them in pairs.
#[repr(align(128))]
struct Member {
    progress: AtomicU64,
    slots: Box<[Slot]>,
}

#[repr(align(128))]
struct Slot {
    /// One more than the number of the call it holds; 0 before the first.
    stamp: AtomicU64,
    posting: UnsafeCell<Posting>,
    /// For ragged calls: the counts sent to all members, then those received from them.
    ragged: UnsafeCell<Vec<usize>>,
}

// SAFETY: slots are written by their member alone and read by others only after they have seen the
// stamp (release and acquire), until their progress shows that they have finished the call; see
// `post`. The pointers in a posting are only followed under the rules of `start`.
unsafe impl Sync for Board {}
// SAFETY: as above; nothing in a board belongs to a thread.
unsafe impl Send for Board {}

impl Board {
    pub(super) fn new(group: Group, name: Arc<str>, id: u64, depth: usize) -> Self {
        let depth = depth.max(2).next_power_of_two();
        let members = (0..group.len()).map(|_| Member::new(depth)).collect();
        Self { group, name, id, depth: depth as u64, members }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
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
    ) {
        let slot = self.slot(me, sequence);
        // SAFETY: no other thread writes, and by the caller's guarantee none reads any more.
        unsafe {
            *slot.posting.get() = posting;
            if let CollectiveOp::AllToAllRagged { send, receive } = op {
                let counts = &mut *slot.ragged.get();
                counts.clear();
                counts.extend_from_slice(send);
                counts.extend_from_slice(receive);
            }
        }
        slot.stamp.store(sequence + 1, Ordering::SeqCst);
    }

    /// Whether a member has posted call `sequence`.
    pub(super) fn has_posted(&self, member: usize, sequence: u64) -> bool {
        self.slot(member, sequence).stamp.load(Ordering::SeqCst) == sequence + 1
    }

    /// What a member has posted.
    ///
    /// # Safety
    /// `has_posted` was true, and the caller's own progress is not past the call.
    pub(super) unsafe fn posting(&self, member: usize, sequence: u64) -> &Posting {
        // SAFETY: the writer wrote it before the stamp, and writes again only after we have
        // finished the call.
        unsafe { &*self.slot(member, sequence).posting.get() }
    }

    /// The counts that a member sends to and receives from all members.
    ///
    /// # Safety
    /// As for `posting`; and the posting is of a ragged call.
    pub(super) unsafe fn ragged(&self, member: usize, sequence: u64) -> (&[usize], &[usize]) {
        // SAFETY: as for the posting.
        let counts = unsafe { &*self.slot(member, sequence).ragged.get() };
        counts.split_at(self.len())
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
        self.members[member].progress.load(Ordering::SeqCst)
    }

    /// Sets how many calls member `me` has finished.
    pub(super) fn set_progress(&self, me: usize, progress: u64) {
        self.members[me].progress.store(progress, Ordering::SeqCst);
    }

    fn slot(&self, member: usize, sequence: u64) -> &Slot {
        &self.members[member].slots[(sequence & (self.depth - 1)) as usize]
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
        unsafe { self.board.posting(member, self.sequence).site }
    }

    fn ragged(&self, member: usize) -> (&[usize], &[usize]) {
        // SAFETY: as above; it is only asked for if all have called the ragged all-to-all.
        unsafe { self.board.ragged(member, self.sequence) }
    }
}

impl Member {
    fn new(depth: usize) -> Self {
        Self { progress: AtomicU64::new(0), slots: (0..depth).map(|_| Slot::new()).collect() }
    }
}

impl Slot {
    fn new() -> Self {
        let posting = Posting {
            header: Header::nothing(),
            source: Strides::default(),
            send: std::ptr::null(),
            receive: std::ptr::null_mut(),
            site: Site::default(),
        };
        Self {
            stamp: AtomicU64::new(0),
            posting: UnsafeCell::new(posting),
            ragged: UnsafeCell::new(Vec::new()),
        }
    }
}
