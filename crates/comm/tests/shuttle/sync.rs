//! The primitives of the protocol, as the scheduler of random schedules has them.

use std::os::fd::AsFd;
use std::time::Duration;

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
pub(crate) use shuttle::thread::{Thread, current, park_timeout, yield_now};

/// Nothing to wait on but the scheduler: others may run.
#[derive(Default)]
pub(crate) struct Poll {
    waits: usize,
}

impl Poll {
    pub(crate) fn clear(&mut self) {}

    pub(crate) fn add(&mut self, _stream: impl AsFd, _write: bool) {}

    pub(crate) fn wait(&mut self, _timeout: Duration) {
        self.waits += 1;
        yield_now();
    }
}

/// There is no time here: a rank that is never woken is a deadlock, which the scheduler reports.
pub(crate) const TIMED: bool = false;

/// Few, so that ranks fall asleep in the midst of things.
pub(crate) const SPINS: u32 = 3;

/// A look in vain is a chance for another thread.
pub(crate) fn relax() {
    yield_now();
}

/// Between looking and touching, others may run.
pub(crate) fn moment() {
    yield_now();
}
