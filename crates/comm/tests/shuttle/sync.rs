//! The primitives of the protocol, as the scheduler of random schedules has them.

use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use phalanx_sys::futex::Wakers;
use shuttle::thread::{Thread, current, park_timeout};

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use shuttle::thread::{JoinHandle, yield_now};

pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    Ok(shuttle::thread::spawn(work))
}

/// Small, so that the thread is woken.
pub(crate) const WORTH_WAKING: usize = 4;

/// Nothing to wait on but the scheduler: others may run.
#[derive(Default)]
pub(crate) struct Poll {
    waits: usize,
}

impl Poll {
    pub(crate) fn clear(&mut self) {}

    pub(crate) fn add(&mut self, _stream: impl AsFd, _write: bool) {}

    /// Always: whoever looks tries to read.
    pub(crate) fn is_ready(&mut self) -> bool {
        true
    }

    pub(crate) fn wait(&mut self, _timeout: Duration) {
        self.waits += 1;
        yield_now();
    }
}

/// There is no time here: a rank that is never woken is a deadlock, which the scheduler reports.
pub(crate) const TIMED: bool = false;

/// A few times, so that ranks fall asleep in the midst of things.
pub(crate) fn looks_again(looks: u32, _since: Instant) -> bool {
    looks < 3
}

/// A look in vain is a chance for another thread.
pub(crate) fn relax() {
    yield_now();
}

/// Between looking and touching, others may run.
pub(crate) fn moment() {
    yield_now();
}

/// What a rank sleeps on: the scheduler's own way to sleep. The lock is not the scheduler's, which
/// cannot switch threads while it is held.
pub(crate) struct Bell {
    set: AtomicBool,
    thread: std::sync::Mutex<Option<Thread>>,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Self { set: AtomicBool::new(false), thread: Default::default() }
    }

    pub(crate) fn set(&self) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(current());
        self.set.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::SeqCst)
    }

    pub(crate) fn clear(&self) {
        self.set.store(false, Ordering::Relaxed);
    }

    pub(crate) fn sleep(&self, timeout: Duration, _wakers: Wakers) {
        park_timeout(timeout);
    }

    pub(crate) fn ring(&self, _wakers: Wakers) {
        if self.is_set() && self.set.swap(false, Ordering::SeqCst) {
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).clone();
            thread.into_iter().for_each(|thread| thread.unpark());
        }
    }
}
