//! What the ranks of a world do to all others: stop them, wake them, and wait until none of them
//! touches memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::Board;
use super::endpoint::Endpoint;
use super::entries;
use super::head::ANYBODY;
use super::options::Options;
use super::wall::Wall;
use crate::call::OpKind;
use crate::communicator::Stop;
use crate::error::{CommError, Failure};
use crate::site::Site;
use crate::sync::{Ordering, moment, yield_now};

/// The endpoints and shared state of ranks that are threads of this process.
pub(crate) struct World {
    shared: Arc<Shared>,
}

impl World {
    /// A world of `ranks` ranks, at least one.
    pub(crate) fn new(ranks: usize, options: Options) -> Self {
        let wall = Wall::private(ranks.max(1), options.slots());
        Self { shared: Arc::new(Shared::new(Arc::new(wall), options)) }
    }

    /// The endpoints, one for each rank, in order.
    pub(crate) fn into_endpoints(self) -> Result<Vec<Endpoint>, CommError> {
        let ranks = 0..self.shared.wall.ranks();
        ranks.map(|rank| Endpoint::new(self.shared.clone(), rank)).collect()
    }
}

/// Stops the ranks of a world because of one of them.
pub(super) struct Stopper {
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
}

impl Stop for Stopper {
    fn stop(&self, message: &str) -> Failure {
        self.shared.poison(self.rank, self.rank, || message.to_string());
        let own = || Failure { rank: self.rank, message: message.into() };
        self.shared.failure().unwrap_or_else(own)
    }
}

/// A wall with the settings of this process.
pub(super) struct Shared {
    pub(super) options: Options,
    /// Whether waiting ranks spin for a while.
    pub(super) spin: bool,
    pub(super) wall: Arc<Wall>,
}

/// A failure as it is on a wall; its message follows it.
#[repr(C, align(128))]
struct Record {
    rank: usize,
    len: usize,
}

/// In place of the spot of a record, if there was no room for one.
const NO_RECORD: u64 = u64::MAX;

/// After this many looks at a rank that touches memory, and again after as many, it is asked whether
/// its process still lives.
const LOOKS: u32 = 256;

/// A process that touches memory for so long is stopped.
const STOPPED: Duration = Duration::from_secs(2);

impl Shared {
    pub(super) fn new(wall: Arc<Wall>, options: Options) -> Self {
        let spin = options.spins(wall.ranks());
        Self { options, spin, wall }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.wall.head().failure.load(Ordering::SeqCst) != 0
    }

    /// Stops all ranks because of what happened on `rank`; only the first reason is kept. `by` is
    /// the rank that says so, or the starting process.
    pub(super) fn poison(&self, by: usize, rank: usize, message: impl FnOnce() -> String) {
        if !self.is_poisoned() {
            let record = self.record(by, rank, &message());
            let failure = &self.wall.head().failure;
            // Of several at once the first counts, and the others' records are read by nobody.
            let _ = failure.compare_exchange(0, record, Ordering::SeqCst, Ordering::SeqCst);
        }
        for rank in 0..self.wall.ranks() {
            self.wake(rank);
        }
    }

    /// Writes a failure to the shelf of `by`; gives its spot.
    fn record(&self, by: usize, rank: usize, message: &str) -> u64 {
        let bytes = size_of::<Record>() + message.len();
        // A full shelf may be the reason. That of the starting process has room.
        let start = self.wall.allocate(by, bytes);
        let start = start.or_else(|| self.wall.allocate(self.wall.ranks(), bytes));
        let Some(start) = start else { return NO_RECORD };
        // SAFETY: there is room for record and message, which nobody else knows yet.
        unsafe {
            let record = start.cast::<Record>();
            record.write(Record { rank, len: message.len() });
            let text = NonNull::from_ref(message).cast();
            record.add(1).cast::<u8>().copy_from(text, message.len());
        }
        self.wall.origin.spot(start.as_ptr())
    }

    /// The first reason, once there is one.
    pub(super) fn failure(&self) -> Option<Failure> {
        let spot = match self.wall.head().failure.load(Ordering::SeqCst) {
            0 | NO_RECORD => return None,
            spot => spot,
        };
        let record: *const Record = self.wall.origin.at(spot).cast();
        // SAFETY: it was written before its spot was, and lives as long as the wall.
        let (rank, bytes) = unsafe {
            let text = record.add(1).cast::<u8>();
            ((*record).rank, std::slice::from_raw_parts(text, (*record).len))
        };
        Some(Failure { rank, message: String::from_utf8_lossy(bytes).into() })
    }

    /// Returns when no rank touches another's memory, now that the world is poisoned. A process
    /// that has ended touches nothing, whatever it said last. One that is stopped may touch it when
    /// it wakes: that memory is shared and stays mapped, nobody uses it after a failure, and who
    /// makes a new world there ends all processes of the old one first. So nobody waits long for it.
    pub(super) fn quiesce(&self) {
        let start = Instant::now();
        for rank in 0..self.wall.ranks() {
            let mut looks = 0;
            while self.wall.state(rank).touching.load(Ordering::SeqCst) {
                looks += 1;
                if looks % LOOKS == 0 && self.wall.is_gone(rank) {
                    break;
                }
                if looks % LOOKS == 0 && self.wall.shared().is_some() && start.elapsed() > STOPPED {
                    break;
                }
                yield_now();
            }
        }
    }

    /// Does `work`, which touches other ranks' memory, unless the world is poisoned.
    ///
    /// A rank that fails frees its memory as soon as no rank touches other memory. So a rank first
    /// sets its `touching` flag and then checks for poison: one of the two always sees the other.
    pub(super) fn touch(&self, rank: usize, work: impl FnOnce()) -> Option<()> {
        let touching = &self.wall.state(rank).touching;
        touching.store(true, Ordering::SeqCst);
        let sound = !self.is_poisoned();
        if sound {
            moment();
            work();
        }
        touching.store(false, Ordering::Release);
        sound.then_some(())
    }

    /// Records what a rank finished, for error messages.
    pub(super) fn note(&self, rank: usize, board: u64, sequence: u64, kind: OpKind, site: u32) {
        let state = self.wall.state(rank);
        let call = (kind as u64) << 32 | u64::from(site);
        state.finished_board.store(board, Ordering::Relaxed);
        state.finished_call.store(call, Ordering::Relaxed);
        state.finished.store(sequence + 1, Ordering::Relaxed);
    }

    /// What a rank finished last, as text.
    pub(super) fn last_finished(&self, rank: usize) -> String {
        let state = self.wall.state(rank);
        let finished = state.finished.load(Ordering::Relaxed);
        if finished == 0 {
            return "has finished no call yet".to_string();
        }
        let call = state.finished_call.load(Ordering::Relaxed);
        let kind = OpKind::ALL[(call >> 32) as usize];
        let site: Site = entries::site(&self.wall, rank, call as u32);
        let group = entries::group_name(&self.wall, state.finished_board.load(Ordering::Relaxed));
        format!("last finished {kind} #{} of group {group} at `{site}`", finished - 1)
    }

    /// Marks a rank as about to sleep until another rank, or any rank, changes something; it must
    /// look once more after this.
    pub(super) fn about_to_park(&self, rank: usize, waits_for: u64) {
        let sleep = &self.wall.state(rank).sleep;
        sleep.waits_for.store(waits_for, Ordering::SeqCst);
        sleep.bell.set();
    }

    /// Sleeps until another rank wakes this one, or for this time.
    pub(super) fn park(&self, rank: usize, timeout: Duration) {
        self.wall.state(rank).sleep.bell.sleep(timeout, self.wall.wakers());
    }

    /// Marks a rank as awake.
    pub(super) fn awake(&self, rank: usize) {
        self.wall.state(rank).sleep.bell.clear();
    }

    /// Wakes the members of a board that wait for a change by one of them.
    pub(super) fn wake_members(&self, board: &Board, me: usize) {
        let by = board.group.ranks()[me] as u64;
        for &rank in board.group.ranks() {
            let sleep = &self.wall.state(rank).sleep;
            if sleep.bell.is_set() {
                let waits_for = sleep.waits_for.load(Ordering::SeqCst);
                if waits_for == by || waits_for == ANYBODY {
                    self.wake(rank);
                }
            }
        }
    }

    fn wake(&self, rank: usize) {
        self.wall.state(rank).sleep.bell.ring(self.wall.wakers());
    }
}
