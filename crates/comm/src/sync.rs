//! The standard library's primitives that the protocol is made of, in one place: the test of random
//! schedules compiles the protocol a second time with a scheduler's own primitives.

pub(crate) use phalanx_sys::Poll;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
pub(crate) use std::thread::{Thread, current, park_timeout, yield_now};

/// Whether a clock decides when waiting has lasted too long.
pub(crate) const TIMED: bool = true;

/// How many times a rank that may spin looks before it sleeps: some hundred microseconds.
pub(crate) const SPINS: u32 = 2048;

/// Tells the processor, or the scheduler, that this thread is busy waiting.
pub(crate) fn relax() {
    std::hint::spin_loop();
}

/// A point at which the scheduler of the test may switch threads; otherwise it does nothing.
#[inline(always)]
pub(crate) fn moment() {}
