//! The words that all ranks of a world see, and where they lie if the memory is shared.

use std::ops::Range;

use super::board::Slot;
use super::entries::Entry;
use crate::call::OpKind;
use crate::sync::{AtomicBool, AtomicU64, Bell};

/// The beginning of a wall. All words but the first are written once, before any rank comes.
#[repr(C, align(128))]
pub(super) struct Head {
    /// The spot of the record of the first failure; 0 while there is none.
    pub(super) failure: AtomicU64,
    /// That this is a wall, of this build.
    pub(super) mark: [u64; 2],
    /// How many slots rings have.
    pub(super) depth: u64,
    pub(super) layout: WallLayout,
}

impl Head {
    pub(super) fn new(depth: usize, layout: WallLayout) -> Self {
        Self { failure: AtomicU64::new(0), mark: mark(), depth: depth as u64, layout }
    }
}

/// What one rank publishes to all others, for all groups. Only the rank writes it, apart from
/// `sleep`, which others clear, and `gone`.
#[repr(C, align(128))]
pub(super) struct RankState {
    pub(super) sleep: Sleep,
    /// Whether it is touching others' memory now.
    pub(super) touching: AtomicBool,
    /// What it finished last: one more than the sequence number, the board, and kind and site.
    pub(super) finished: AtomicU64,
    pub(super) finished_board: AtomicU64,
    pub(super) finished_call: AtomicU64,
    /// The spot of the first entry that it has published; 0 before that.
    pub(super) first: AtomicU64,
    /// Bytes of its shelf that are taken.
    pub(super) used: AtomicU64,
    /// Whether its process has come.
    pub(super) came: AtomicBool,
    /// Whether its process has ended, as the starting process says.
    pub(super) gone: AtomicBool,
    /// Where its arena lies in its room, and how many bytes it has; zeros before it has one.
    pub(super) arena: [AtomicU64; 2],
}

/// On its own cache line, because others read it in every call, and the rank writes other fields in
/// every call.
#[repr(C, align(128))]
pub(super) struct Sleep {
    /// Set while it sleeps, or is about to.
    pub(super) bell: Bell,
    /// The rank that it waits for, or `ANYBODY`.
    pub(super) waits_for: AtomicU64,
}

/// Marks a sleeper that must be woken by every change.
pub(super) const ANYBODY: u64 = u64::MAX;

impl RankState {
    pub(super) fn new() -> Self {
        Self {
            sleep: Sleep { bell: Bell::new(), waits_for: AtomicU64::new(0) },
            touching: AtomicBool::new(false),
            finished: AtomicU64::new(0),
            finished_board: AtomicU64::new(0),
            finished_call: AtomicU64::new(0),
            first: AtomicU64::new(0),
            used: AtomicU64::new(0),
            came: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            arena: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }
}

/// How a wall is divided: head, a state for each rank, and if it is shared a shelf for each, where
/// it publishes rings and names, and a room for each, where its data lie. There is one more state
/// and one more shelf, of the starting process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct WallLayout {
    pub(super) ranks: usize,
    /// Bytes of a shelf.
    pub(super) shelf: usize,
    /// Bytes of a room.
    pub(super) room: usize,
}

impl WallLayout {
    /// Shelves and rooms begin at multiples of this, the size of a huge page.
    pub(super) const STEP: usize = 2 << 20;

    /// The layout of a wall of which nothing is shared with other processes.
    pub(super) fn private(ranks: usize) -> Self {
        Self { ranks, shelf: 0, room: 0 }
    }

    /// The bytes of head and states.
    pub(super) fn words(&self) -> usize {
        size_of::<Head>() + (self.ranks + 1) * size_of::<RankState>()
    }

    pub(super) fn shelf(&self, rank: usize) -> Range<usize> {
        let start = self.words().next_multiple_of(Self::STEP) + rank * self.shelf;
        start..start + self.shelf
    }

    pub(super) fn room(&self, rank: usize) -> Range<usize> {
        let start = self.shelf(self.ranks).end + rank * self.room;
        start..start + self.room
    }

    /// All bytes; `None` if there is no such number.
    pub(super) fn bytes(&self) -> Option<usize> {
        let shelves = self.shelf.checked_mul(self.ranks.checked_add(1)?)?;
        let rooms = self.room.checked_mul(self.ranks)?;
        self.words().next_multiple_of(Self::STEP).checked_add(shelves)?.checked_add(rooms)
    }
}

/// What the head of a wall is recognised by: a number of our own, and one that changes with the
/// version and with the size of anything on a wall.
pub(super) fn mark() -> [u64; 2] {
    let sizes = [
        size_of::<Head>(),
        size_of::<RankState>(),
        size_of::<Entry>(),
        size_of::<Slot>(),
        OpKind::ALL.len(),
    ];
    let version = env!("CARGO_PKG_VERSION").bytes().map(usize::from);
    let digest = version.chain(sizes).fold(0xcbf2_9ce4_8422_2325, |digest: u64, part| {
        (digest ^ part as u64).wrapping_mul(0x0100_0000_01b3)
    });
    [u64::from_le_bytes(*b"phalanx\0"), digest]
}
