//! Memory that other processes see: arenas in it, and calls whose buffers lie elsewhere.
//!
//! A process sees nothing of another one but shared memory. An engine takes its arena from there,
//! and its calls need no copies. Blocks of other calls are copied there before the call is posted,
//! and results back when it has ended: correct, but slower. A call that finds no room waits until
//! earlier ones have ended.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_sys::{Arena, SharedMemory};

use super::options::ArenaLife;
use super::room::Room;
use super::wall::Wall;
use crate::blocks::{Blocks, Strides};
use crate::call::{Call, OpKind};
use crate::error::CommError;
use crate::kernel::{self, Meter, Place};
use crate::sync::Ordering;

/// So much of the beginning of a room, where staged calls lie, stays in memory between calls.
const KEPT_BYTES: usize = 64 << 20;

/// One rank's room, and which calls use it.
pub(super) struct Staging {
    lender: Arc<Lender>,
    /// The staged calls that have not ended.
    calls: Vec<Staged>,
}

/// Manages one rank's room.
struct Lender {
    rank: usize,
    memory: Arc<SharedMemory>,
    wall: Arc<Wall>,
    life: ArenaLife,
    /// Where the room lies in the memory.
    place: Range<usize>,
    /// The lock is this process's alone.
    room: Mutex<Room>,
}

/// A call of which a buffer was replaced.
struct Staged {
    /// The call, as its endpoint numbers it; unknown before it was posted.
    call: usize,
    parts: [Range<usize>; 2],
    /// What is copied back at the end, if anything.
    result: Option<Copied>,
}

/// Blocks that are copied from one buffer to another with the same strides.
#[derive(Clone, Copy)]
struct Copied {
    from: *const u8,
    to: *mut u8,
    blocks: usize,
    /// The last one in bytes.
    shape: [usize; 3],
    strides: Strides,
    size: usize,
}

impl Staging {
    /// The room of a rank; `None` if ranks see all memory anyway.
    pub(super) fn of(wall: &Arc<Wall>, rank: usize, life: ArenaLife) -> Option<Self> {
        let (memory, place) = (wall.shared()?.clone(), wall.head().layout.room(rank));
        let room = Mutex::new(Room::new(place.len()));
        let wall = wall.clone();
        let lender = Arc::new(Lender { rank, memory, wall, life, place, room });
        Some(Self { lender, calls: Vec::new() })
    }

    /// How many staged calls have not ended.
    pub(super) fn outstanding(&self) -> usize {
        self.calls.len()
    }

    /// The oldest of them.
    pub(super) fn oldest(&self) -> Option<usize> {
        self.calls.first().map(|staged| staged.call)
    }

    /// Zeroed memory that all ranks see.
    pub(super) fn arena(&self, bytes: usize) -> Result<Arena, CommError> {
        Lender::lend(&self.lender, bytes)
    }

    /// Copies what a call sends to where others see it. Gives where both buffers are now, and
    /// whether one was replaced: then the call must be posted. There may be no room now, or never.
    ///
    /// # Safety
    /// As for `Communicator::start`, for a call that was found valid, of place `me` of a group of
    /// `n`.
    pub(super) unsafe fn stage(
        &mut self,
        call: &Call<'_>,
        (n, me): (usize, usize),
        send: *const u8,
        receive: *mut u8,
    ) -> Result<(*const u8, *mut u8, bool), NoRoom> {
        let size = call.dtype.size();
        let (given, got) = call.elements(n, me).unwrap_or((0, 0));
        let outside = |pointer: *const u8, elements: usize| match elements * size {
            bytes if bytes == 0 || self.lender.holds(pointer, bytes) => 0,
            bytes => bytes,
        };
        let needed = [outside(send, given), outside(receive, got)];
        if needed == [0, 0] {
            return Ok((send, receive, false));
        }
        let (gives, takes) = call.op.blocks(n, me);
        let in_place = needed[0] == needed[1]
            && send == receive.cast_const()
            && call.blocks.source == call.blocks.target;
        let parts = self.lender.take([needed[0], if in_place { 0 } else { needed[1] }])?;
        let at = [&parts[0], &parts[usize::from(!in_place)]].map(|part| self.lender.at(part));
        let (sent, received) = (
            if needed[0] > 0 { at[0].cast_const() } else { send },
            if needed[1] > 0 { at[1] } else { receive },
        );
        let source = Copied::of(call, call.blocks.source, gives);
        let target = Copied::of(call, call.blocks.target, takes);
        // What is there stays there, or is added to.
        let keeps = call.accumulate || call.op.kind() == OpKind::AllToAllRagged;
        // SAFETY: the caller guarantees the blocks, the parts are as large as their span, and of the target only what
        // the result keeps is copied.
        unsafe {
            if needed[0] > 0 {
                source.between(send, at[0]).run();
            }
            if needed[1] > 0 && keeps {
                target.between(receive, received).run();
            }
        }
        let result = (needed[1] > 0).then(|| target.between(received, receive));
        self.calls.push(Staged { call: usize::MAX, parts, result });
        Ok((sent, received, true))
    }

    /// Says which call the one that was staged last is.
    pub(super) fn began(&mut self, call: usize) {
        if let Some(staged) = self.calls.last_mut() {
            staged.call = call;
        }
    }

    /// Copies the result of a call that has ended to where it belongs.
    ///
    /// # Safety
    /// No rank touches the call's buffers any more, and the user's still follow the rules of
    /// `Communicator::start`.
    pub(super) unsafe fn end(&mut self, call: usize) {
        let Some(at) = self.calls.iter().position(|staged| staged.call == call) else { return };
        let staged = self.calls.remove(at);
        if let Some(result) = staged.result {
            // SAFETY: the caller guarantees the target blocks; the part is ours until below.
            unsafe { result.run() };
        }
        staged.parts.into_iter().for_each(|part| self.lender.give(part, KEPT_BYTES));
    }
}

/// There is no room for a call.
pub(super) struct NoRoom {
    /// How much it needs.
    pub(super) bytes: usize,
    /// The largest part that is free.
    pub(super) largest: usize,
}

impl Lender {
    /// Zeroed memory of this room; it comes back when the arena is dropped.
    fn lend(lender: &Arc<Self>, bytes: usize) -> Result<Arena, CommError> {
        let refused = |error: String| CommError::System {
            what: format!("{bytes} bytes of shared memory for rank {}", lender.rank),
            error,
        };
        let whole = bytes.checked_next_multiple_of(SharedMemory::PAGE);
        let part = whole.and_then(|whole| lender.lock().take_last(whole, SharedMemory::PAGE));
        let part = part.ok_or_else(|| {
            refused(format!(
                "each rank of this world has {} bytes, of which {} in one piece are free; they are \
                the machine's memory, or less if address space or files are limited (ulimit -v, -f)",
                lender.place.len(),
                lender.lock().largest()
            ))
        })?;
        let lent = Lent { lender: lender.clone(), part: part.clone() };
        let known = &lender.wall.state(lender.rank).arena;
        let here = [part.start as u64, bytes as u64];
        if lender.life == ArenaLife::TakenOver {
            let before = [0, 1].map(|at| known[at].load(Ordering::SeqCst));
            if before != here {
                return Err(refused(format!(
                    "the arena that is to be taken over has {} bytes at {}, not {bytes} at {}",
                    before[1], before[0], part.start
                )));
            }
        } else {
            // An earlier process of this rank may have used it, and arenas begin with zeros.
            lender.clear(&part, 0).map_err(refused)?;
        }
        [0, 1].into_iter().for_each(|at| known[at].store(here[at], Ordering::SeqCst));
        // SAFETY: the part is aligned to pages, mapped as long as `lent` keeps the memory, zeroed
        // by the system or written by an earlier process, and lent to nobody else until `lent` is
        // dropped.
        Ok(unsafe { Arena::lent(lender.at(&part), bytes, Box::new(lent)) })
    }

    fn lock(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether bytes are in memory that all ranks see.
    fn holds(&self, pointer: *const u8, bytes: usize) -> bool {
        let offset = pointer.addr().wrapping_sub(self.memory.as_ptr().addr());
        offset.checked_add(bytes).is_some_and(|end| end <= self.memory.len())
    }

    fn take(&self, bytes: [usize; 2]) -> Result<[Range<usize>; 2], NoRoom> {
        let mut room = self.lock();
        let refuse = |room: &Room| NoRoom { bytes: bytes[0] + bytes[1], largest: room.largest() };
        let Some(first) = room.take_first(bytes[0]) else { return Err(refuse(&room)) };
        let Some(second) = room.take_first(bytes[1]) else {
            room.give(first);
            return Err(refuse(&room));
        };
        Ok([first, second])
    }

    /// Takes a part back; what lies behind the first `kept` bytes of the room takes no more memory.
    fn give(&self, part: Range<usize>, kept: usize) {
        // If the system refuses, the bytes stay in memory, and are cleared before they are lent.
        let _ = self.clear(&part, kept);
        self.lock().give(part);
    }

    fn clear(&self, part: &Range<usize>, kept: usize) -> Result<(), String> {
        let range = self.place.start + part.start.max(kept)..self.place.start + part.end;
        if range.is_empty() {
            return Ok(());
        }
        self.memory.clear(range).map_err(|error| error.to_string())
    }

    fn at(&self, part: &Range<usize>) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.place.start + part.start)
    }
}

/// A part of a room that an arena uses.
struct Lent {
    lender: Arc<Lender>,
    part: Range<usize>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.lender.life != ArenaLife::Own {
            // Another process may take it over.
            self.lender.lock().give(self.part.clone());
            return;
        }
        self.lender.give(self.part.clone(), 0);
    }
}

impl Copied {
    /// Blocks of a call, this many or as many as there are elements, between buffers that follow.
    fn of(call: &Call<'_>, strides: Strides, blocks: usize) -> Self {
        let size = call.dtype.size();
        let Blocks { outer, rows, len, .. } = call.blocks;
        let shape = [outer, rows, len * size];
        let (from, to) = (std::ptr::null(), std::ptr::null_mut());
        Self { from, to, blocks, shape, strides, size }
    }

    fn between(self, from: *const u8, to: *mut u8) -> Self {
        Self { from, to, ..self }
    }

    /// # Safety
    /// The blocks of both buffers may be read and written by this thread, and do not overlap.
    unsafe fn run(self) {
        for block in 0..self.blocks {
            let from = Place::of(self.from.cast_mut(), self.strides, block, self.size);
            let to = Place::of(self.to, self.strides, block, self.size);
            // SAFETY: the caller guarantees the blocks. No byte is another rank's.
            unsafe { kernel::copy(self.shape, from, to, &mut Meter::default()) };
        }
    }
}
