//! The memory in which ranks meet: threads of one process, or processes that map it.
//!
//! Processes see it at different addresses. So whatever is written there names memory by its
//! *spot*: the distance from where the wall begins. Threads see everything at the same address, and
//! their spots count from 0: a spot is an address, and every address has one. The code is the same.
//!
//! There are no locks in it. Every word has one writer, except flags that several ranks may raise or
//! lower, and the word of the first failure, which is set by one compare-and-swap. What was
//! published once stays until the wall ends, so nobody can read what another one has freed.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_sys::futex::Wakers;
use phalanx_sys::{SharedMemory, SysError};

use super::head::{Head, RankState, WallLayout};
use crate::sync::Ordering;

/// What all ranks of a world see.
pub(super) struct Wall {
    pub(super) origin: Origin,
    head: NonNull<Head>,
    states: NonNull<[RankState]>,
    memory: Memory,
}

/// Where spots count from.
#[derive(Clone, Copy)]
pub(super) struct Origin(usize);

impl Origin {
    /// What other ranks call an address of this one.
    #[inline(always)]
    pub(super) fn spot(self, pointer: *const u8) -> u64 {
        pointer.expose_provenance().wrapping_sub(self.0) as u64
    }

    /// Where this rank sees a spot.
    #[inline(always)]
    pub(super) fn at(self, spot: u64) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.0.wrapping_add(spot as usize))
    }
}

enum Memory {
    /// Memory of this process, which grows. The lock guards the list, not what is in the memory.
    Own(Mutex<Vec<Block>>),
    Shared(Arc<SharedMemory>),
}

// SAFETY: what is on a wall is made for ranks on any thread: atomics, and words that are written
// once, before an atomic says so.
unsafe impl Send for Wall {}
// SAFETY: as above.
unsafe impl Sync for Wall {}

impl Wall {
    /// A wall for threads of this process.
    pub(super) fn private(ranks: usize, depth: usize) -> Self {
        let layout = WallLayout::private(ranks);
        let block = Block::new(layout.words());
        // SAFETY: the block has room for the words, nobody else knows it, and it is freed after
        // the wall's other fields are no longer used.
        unsafe {
            write_words(block.0, depth, layout);
            Self::over(block.0, Origin(0), Memory::Own(Mutex::new(vec![block])))
        }
    }

    /// Makes a wall for processes in new memory, which is as long as the layout says.
    pub(super) fn create(memory: Arc<SharedMemory>, depth: usize, layout: WallLayout) -> Self {
        let base = NonNull::new(memory.as_ptr()).unwrap_or(NonNull::dangling());
        assert!(layout.bytes().is_some_and(|bytes| bytes <= memory.len()), "{layout:?}");
        // SAFETY: the memory has room for the words, and nobody else knows it yet.
        unsafe { write_words(base, depth, layout) };
        Self::attach(memory)
    }

    /// A new wall in the memory of an old one, whose ranks have all ended; the caller has checked its
    /// head. What lies in rooms stays, and where arenas are is still known.
    pub(super) fn renew(memory: Arc<SharedMemory>, depth: usize) -> Result<Self, SysError> {
        let old = Self::attach(memory.clone());
        let (layout, ranks) = (old.head().layout, old.ranks());
        let word = |rank: usize, at: usize| old.state(rank).arena[at].load(Ordering::SeqCst);
        let arenas: Vec<[u64; 2]> = (0..ranks).map(|rank| [word(rank, 0), word(rank, 1)]).collect();
        drop(old);
        memory.clear(layout.shelf(0).start..layout.shelf(ranks).end)?;
        let new = Self::create(memory, depth, layout);
        for (rank, [start, bytes]) in arenas.into_iter().enumerate() {
            new.state(rank).arena[0].store(start, Ordering::SeqCst);
            new.state(rank).arena[1].store(bytes, Ordering::SeqCst);
        }
        Ok(new)
    }

    /// A wall that another process has made; the caller has checked its head.
    pub(super) fn attach(memory: Arc<SharedMemory>) -> Self {
        let base = NonNull::new(memory.as_ptr()).unwrap_or(NonNull::dangling());
        // SAFETY: the memory begins with a head and states, and is mapped as long as the wall lives.
        unsafe { Self::over(base, Origin(base.addr().get()), Memory::Shared(memory)) }
    }

    /// # Safety
    /// `base` is the head of a wall with its states, which `memory` keeps alive.
    unsafe fn over(base: NonNull<u8>, origin: Origin, memory: Memory) -> Self {
        let head: NonNull<Head> = base.cast();
        // SAFETY: the caller guarantees head and states.
        let (count, first) = unsafe { (head.as_ref().layout.ranks + 1, head.add(1).cast()) };
        Self { origin, head, states: NonNull::slice_from_raw_parts(first, count), memory }
    }

    pub(super) fn head(&self) -> &Head {
        // SAFETY: it lives as long as the wall, and is only changed through atomics.
        unsafe { self.head.as_ref() }
    }

    /// How many ranks there are.
    pub(super) fn ranks(&self) -> usize {
        self.states.len() - 1
    }

    /// The state of a rank; that of the starting process follows the last.
    pub(super) fn state(&self, rank: usize) -> &RankState {
        // SAFETY: they live as long as the wall, and are only changed through atomics.
        unsafe { &self.states.as_ref()[rank] }
    }

    /// The memory that other processes see too; `None` if ranks are threads, and see everything.
    pub(super) fn shared(&self) -> Option<&Arc<SharedMemory>> {
        match &self.memory {
            Memory::Own(_) => None,
            Memory::Shared(memory) => Some(memory),
        }
    }

    /// Who wakes sleepers.
    pub(super) fn wakers(&self) -> Wakers {
        match &self.memory {
            Memory::Own(_) => Wakers::Threads,
            Memory::Shared(_) => Wakers::Processes,
        }
    }

    /// Zeroed memory for what a rank publishes, aligned to two cache lines, never freed before the
    /// wall; `None` if its shelf is full.
    pub(super) fn allocate(&self, rank: usize, bytes: usize) -> Option<NonNull<u8>> {
        let bytes = bytes.next_multiple_of(ALIGN);
        match &self.memory {
            Memory::Own(blocks) => {
                let block = Block::new(bytes);
                let start = block.0;
                blocks.lock().unwrap_or_else(PoisonError::into_inner).push(block);
                Some(start)
            }
            Memory::Shared(_) => {
                let shelf = self.head().layout.shelf(rank);
                let taken = self.state(rank).used.fetch_add(bytes as u64, Ordering::SeqCst);
                let start = shelf.start + taken as usize;
                let fits = shelf.end.checked_sub(start).is_some_and(|left| bytes <= left);
                NonNull::new(self.origin.at(start as u64)).filter(|_| fits)
            }
        }
    }

    /// Whether a rank's process has ended. A thread never ends before its endpoint.
    pub(super) fn is_gone(&self, rank: usize) -> bool {
        let Memory::Shared(memory) = &self.memory else { return false };
        let state = self.state(rank);
        let told = state.gone.load(Ordering::SeqCst);
        told || (state.came.load(Ordering::SeqCst) && !memory.is_held(rank))
    }
}

const ALIGN: usize = 128;

/// Writes the words that a new wall begins with.
///
/// # Safety
/// There is room for them, aligned, and nobody else uses it.
unsafe fn write_words(base: NonNull<u8>, depth: usize, layout: WallLayout) {
    let head: NonNull<Head> = base.cast();
    // SAFETY: the caller guarantees room for the head and one state more than there are ranks.
    unsafe {
        head.write(Head::new(depth, layout));
        let first: NonNull<RankState> = head.add(1).cast();
        (0..=layout.ranks).for_each(|rank| first.add(rank).write(RankState::new()));
    }
}

/// Zeroed memory of this process.
struct Block(NonNull<u8>, Layout);

// SAFETY: it is plain memory, which no thread owns.
unsafe impl Send for Block {}

impl Block {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(ALIGN), ALIGN);
        let layout = layout.unwrap_or_else(|_| Layout::new::<[u8; ALIGN]>());
        assert!(layout.size() >= bytes, "{bytes} bytes are no size");
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        Self(start.unwrap_or_else(|| handle_alloc_error(layout)), layout)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped with the wall, after which nobody uses
        // what is on it.
        unsafe { dealloc(self.0.as_ptr(), self.1) };
    }
}
