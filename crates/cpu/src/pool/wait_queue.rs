//! Waiting for a condition on atomics: polling first, then sleeping.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long to poll a condition before sleeping.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// Polls without giving up the core.
    pub(super) spins: u32,
    /// Polls between which another thread may use the core.
    pub(super) yields: u32,
}

/// Wakes threads that sleep until a condition on other atomics holds; costs one load if none
/// sleeps.
#[derive(Default)]
pub(super) struct WaitQueue {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl WaitQueue {
    /// Must be called after every change that may make a condition true.
    pub(super) fn ring(&self) {
        // Orders the change before the look at the sleepers; a sleeper counts itself, passes the
        // same fence, and then looks at its condition: at least one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Waits until `ready`, at most for `limit`; returns whether it became ready.
    pub(super) fn wait(
        &self,
        patience: Patience,
        limit: Option<Duration>,
        ready: impl Fn() -> bool,
    ) -> bool {
        for _ in 0..patience.spins {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        for _ in 0..patience.yields {
            if ready() {
                return true;
            }
            std::thread::yield_now();
        }
        self.sleep(limit, ready)
    }

    #[cold]
    fn sleep(&self, limit: Option<Duration>, ready: impl Fn() -> bool) -> bool {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut is_ready = ready();
        while !is_ready {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            guard = match left {
                Some(Duration::ZERO) => break,
                Some(left) => match self.wake.wait_timeout(guard, left) {
                    Ok((guard, _)) => guard,
                    Err(poisoned) => poisoned.into_inner().0,
                },
                None => self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner),
            };
            is_ready = ready();
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        is_ready
    }
}
