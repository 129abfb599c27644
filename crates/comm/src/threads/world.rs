//! What the ranks of a world share: boards, the first failure, and which ranks sleep.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::board::Board;
use super::endpoint::Endpoint;
use crate::call::OpKind;
use crate::communicator::Stop;
use crate::error::Failure;
use crate::group::Group;
use crate::site::Site;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, Thread, moment, yield_now};

/// How ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Like `Spin` if every thread of every rank has a core, else like `Park`.
    Auto,
    /// Busy waiting for a fraction of a millisecond, then sleeping: the fastest, if every thread
    /// has its own core.
    Spin,
    /// Sleeping at once, so that other threads can use the core.
    Park,
}

/// The settings of a world.
#[derive(Clone, Debug)]
pub struct Options {
    /// The time after which a missing rank is an error.
    pub timeout: Duration,
    /// How ranks wait.
    pub waiting: Waiting,
    /// How many threads each rank computes with, for [`Waiting::Auto`].
    pub threads_per_rank: usize,
    /// Whether rank threads are bound to their own cores, `threads_per_rank` for each, if there are
    /// enough for all. For programs that have the machine to themselves.
    pub bind: bool,
    /// How many calls of one group a rank can have outstanding before starting another one waits;
    /// rounded up to a power of two.
    pub depth: usize,
    /// For tests of the counters: every call of this kind that moves data between ranks copies 64
    /// bytes of a peer's memory more than it needs.
    pub planted_copy: Option<OpKind>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            waiting: Waiting::Auto,
            threads_per_rank: 1,
            bind: false,
            depth: 32,
            planted_copy: None,
        }
    }
}

/// The endpoints and shared state of ranks that are threads of this process.
pub(crate) struct World {
    shared: Arc<Shared>,
}

impl World {
    /// A world of `ranks` ranks, at least one.
    pub(crate) fn new(ranks: usize, options: Options) -> Self {
        let ranks = ranks.max(1);
        let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let spin = match options.waiting {
            Waiting::Auto => ranks * options.threads_per_rank.max(1) <= cores(),
            Waiting::Spin => true,
            Waiting::Park => false,
        };
        let shared = Shared {
            options,
            spin,
            ranks: (0..ranks).map(|_| RankState::default()).collect(),
            poisoned: AtomicBool::new(false),
            failure: Mutex::new(None),
            boards: Mutex::new(Boards::default()),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The endpoints, one for each rank, in order.
    pub(crate) fn into_endpoints(self) -> Vec<Endpoint> {
        (0..self.shared.ranks.len()).map(|rank| Endpoint::new(self.shared.clone(), rank)).collect()
    }
}

/// Stops the ranks of a world because of one of them.
pub(super) struct Stopper {
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
}

impl Stop for Stopper {
    fn stop(&self, message: &str) -> Failure {
        self.shared.poison(self.rank, || message.to_string());
        let own = || Failure { rank: self.rank, message: message.into() };
        self.shared.failure().unwrap_or_else(own)
    }
}

/// State that all endpoints share.
pub(super) struct Shared {
    pub(super) options: Options,
    /// Whether waiting ranks spin for a while.
    pub(super) spin: bool,
    pub(super) ranks: Box<[RankState]>,
    poisoned: AtomicBool,
    failure: Mutex<Option<Failure>>,
    boards: Mutex<Boards>,
}

#[derive(Default)]
struct Boards {
    list: Vec<Arc<Board>>,
    ids: HashMap<(Group, Option<u32>), usize>,
}

/// What one rank publishes to all others, for all groups.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct RankState {
    sleep: Sleep,
    /// Whether it is touching others' memory now.
    touching: AtomicBool,
    /// What it finished last: one more than the sequence number, the board, and kind and site.
    finished: AtomicU64,
    finished_board: AtomicU64,
    finished_call: AtomicU64,
}

/// On its own cache line, because others read it in every call, and the rank writes other fields in
/// every call.
#[derive(Default)]
#[repr(align(128))]
struct Sleep {
    /// Whether it sleeps, or is about to.
    parked: AtomicBool,
    /// The rank that it waits for, or `ANYBODY`.
    waits_for: AtomicU64,
    /// The thread to wake.
    thread: Mutex<Option<Thread>>,
}

/// Marks a sleeper that must be woken by every change.
pub(super) const ANYBODY: u64 = u64::MAX;

impl Shared {
    /// The board of a group, or of a channel between two ranks; made when first needed.
    pub(super) fn board(&self, group: &Group, channel: Option<u32>) -> Arc<Board> {
        let mut boards = lock(&self.boards);
        let key = (group.clone(), channel);
        if let Some(&id) = boards.ids.get(&key) {
            return boards.list[id].clone();
        }
        let id = boards.list.len();
        let name = match (channel, group.ranks()) {
            (Some(channel), [from, to]) => format!("{from}->{to} (channel {channel})"),
            _ => group.to_string(),
        };
        let board = Board::new(group.clone(), name.into(), id as u64, self.options.depth);
        let board = Arc::new(board);
        boards.ids.insert(key, id);
        boards.list.push(board.clone());
        board
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::SeqCst)
    }

    /// Stops all ranks; only the first reason is kept.
    pub(super) fn poison(&self, rank: usize, message: impl FnOnce() -> String) {
        let mut failure = lock(&self.failure);
        if failure.is_none() {
            *failure = Some(Failure { rank, message: message().into() });
        }
        drop(failure);
        self.poisoned.store(true, Ordering::SeqCst);
        for rank in 0..self.ranks.len() {
            self.wake(rank);
        }
    }

    /// The first reason, once there is one.
    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    /// Returns when no rank touches another's memory, now that the world is poisoned.
    pub(super) fn quiesce(&self) {
        for state in &self.ranks {
            while state.touching.load(Ordering::SeqCst) {
                yield_now();
            }
        }
    }

    /// Does `work`, which touches other ranks' memory, unless the world is poisoned.
    ///
    /// A rank that fails frees its memory as soon as no rank touches other memory. So a rank first
    /// sets its `touching` flag and then checks for poison: one of the two always sees the other.
    pub(super) fn touch(&self, rank: usize, work: impl FnOnce()) -> Option<()> {
        let touching = &self.ranks[rank].touching;
        touching.store(true, Ordering::SeqCst);
        let sound = !self.poisoned.load(Ordering::SeqCst);
        if sound {
            moment();
            work();
        }
        touching.store(false, Ordering::Release);
        sound.then_some(())
    }

    /// Records what a rank finished, for error messages.
    pub(super) fn note(&self, rank: usize, board: u64, sequence: u64, kind: OpKind, site: Site) {
        let state = &self.ranks[rank];
        let call = (kind as u64) << 32 | u64::from(site.id());
        state.finished_board.store(board, Ordering::Relaxed);
        state.finished_call.store(call, Ordering::Relaxed);
        state.finished.store(sequence + 1, Ordering::Relaxed);
    }

    /// What a rank finished last, as text.
    pub(super) fn last_finished(&self, rank: usize) -> String {
        let state = &self.ranks[rank];
        let finished = state.finished.load(Ordering::Relaxed);
        if finished == 0 {
            return "has finished no call yet".to_string();
        }
        let call = state.finished_call.load(Ordering::Relaxed);
        let (kind, site) = (OpKind::ALL[(call >> 32) as usize], Site::from_id(call as u32));
        let board = state.finished_board.load(Ordering::Relaxed) as usize;
        let group = lock(&self.boards).list[board].name.clone();
        format!("last finished {kind} #{} of group {group} at `{site}`", finished - 1)
    }

    /// Marks a rank as about to sleep until another rank, or any rank, changes something; it must
    /// look once more after this.
    pub(super) fn about_to_park(&self, rank: usize, waits_for: u64, thread: Thread) {
        let state = &self.ranks[rank].sleep;
        state.waits_for.store(waits_for, Ordering::SeqCst);
        *lock(&state.thread) = Some(thread);
        state.parked.store(true, Ordering::SeqCst);
    }

    /// Marks a rank as awake.
    pub(super) fn awake(&self, rank: usize) {
        self.ranks[rank].sleep.parked.store(false, Ordering::Relaxed);
    }

    /// Wakes the members of a board that wait for a change by one of them.
    pub(super) fn wake_members(&self, board: &Board, me: usize) {
        let by = board.group.ranks()[me] as u64;
        for &rank in board.group.ranks() {
            let sleep = &self.ranks[rank].sleep;
            if sleep.parked.load(Ordering::SeqCst) {
                let waits_for = sleep.waits_for.load(Ordering::SeqCst);
                if waits_for == by || waits_for == ANYBODY {
                    self.wake(rank);
                }
            }
        }
    }

    fn wake(&self, rank: usize) {
        let state = &self.ranks[rank].sleep;
        if state.parked.load(Ordering::SeqCst) && state.parked.swap(false, Ordering::SeqCst) {
            let thread = lock(&state.thread).clone();
            if let Some(thread) = thread {
                thread.unpark();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
