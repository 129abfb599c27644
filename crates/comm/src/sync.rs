//! The standard library's primitives that the protocol is made of, in one place: the test of random
//! schedules compiles the protocol a second time with a scheduler's own primitives.

use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use phalanx_sys::futex::{self, Wakers};

pub(crate) use phalanx_sys::Poll;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{JoinHandle, yield_now};

/// Starts a thread.
pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("progress".to_owned()).spawn(work)
}

/// The fewest bytes of a block for which a thread is woken while a rank computes: what is smaller has gone with its call.
pub(crate) const WORTH_WAKING: usize = 64 << 10;

/// Whether a clock decides when waiting has lasted too long.
pub(crate) const TIMED: bool = true;

/// Whether a rank that may spin, has looked so many times and waits since then looks again before it sleeps. Looks are
/// cheap on some machines, so time counts too: to wake a sleeper takes longer than a peer sums a few MiB.
pub(crate) fn looks_again(looks: u32, since: Instant) -> bool {
    looks < LOOKS || since.elapsed() < PATIENCE
}

const LOOKS: u32 = 2048;
const PATIENCE: Duration = Duration::from_micros(400);

/// Tells the processor, or the scheduler, that this thread is busy waiting.
pub(crate) fn relax() {
    std::hint::spin_loop();
}

/// A point at which the scheduler of the test may switch threads; otherwise it does nothing.
#[inline(always)]
pub(crate) fn moment() {}

/// What a rank sleeps on, in memory that others see. It sets the bell, looks once more, and sleeps;
/// a rank that changes something afterwards sees that it is set, and rings.
#[repr(transparent)]
pub(crate) struct Bell(AtomicU32);

impl Bell {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Says that this rank is about to sleep.
    pub(crate) fn set(&self) {
        self.0.store(1, Ordering::SeqCst);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst) != 0
    }

    /// Says that this rank is awake.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Sleeps while the bell is set, for at most this time.
    pub(crate) fn sleep(&self, timeout: Duration, wakers: Wakers) {
        futex::sleep_while(&self.0, 1, timeout, wakers);
    }

    /// Wakes the rank, if its bell is set.
    pub(crate) fn ring(&self, wakers: Wakers) {
        if self.is_set() && self.0.swap(0, Ordering::SeqCst) != 0 {
            futex::wake(&self.0, wakers);
        }
    }
}
