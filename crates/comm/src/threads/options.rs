//! The settings of a world.

use std::sync::Arc;
use std::time::Duration;

use crate::call::OpKind;
use crate::communicator::CallWatch;

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
    /// Records the calls of a rank that is a process, if set.
    pub watch: Option<Arc<dyn CallWatch>>,
    /// What becomes of the arena of a rank that is a process.
    pub arena: ArenaLife,
    /// Whether exchanges between all members of a group go before other calls that can move, whichever was
    /// started first (Lina: Li et al., 2023). Only where ranks share memory.
    pub exchanges_first: bool,
}

/// How long the memory of an arena lives, where processes share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ArenaLife {
    /// As long as the arena.
    #[default]
    Own,
    /// As long as a process holds the world: what is in it can be taken over.
    Kept,
    /// The same, and it begins as the last process of this rank has left it.
    TakenOver,
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
            watch: None,
            arena: ArenaLife::Own,
            exchanges_first: false,
        }
    }
}

impl Options {
    /// Whether waiting ranks of a world of this size spin for a while.
    pub(crate) fn spins(&self, ranks: usize) -> bool {
        let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
        match self.waiting {
            Waiting::Auto => ranks * self.threads_per_rank.max(1) <= cores(),
            Waiting::Spin => true,
            Waiting::Park => false,
        }
    }

    /// How many slots a ring has: a power of two.
    pub(super) fn slots(&self) -> usize {
        self.depth.max(2).next_power_of_two()
    }
}
