//! Sleeping on a word of memory until another thread, or another process, wakes the sleeper.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Who may wake a sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakers {
    /// Threads of this process, which the system finds faster.
    Threads,
    /// Threads of every process that maps the word.
    Processes,
}

/// Sleeps while the word has a value, for at most this time. It may return early without a reason:
/// check again.
pub fn sleep_while(word: &AtomicU32, value: u32, timeout: Duration, wakers: Wakers) {
    system::wait(word, value, timeout, wakers);
}

/// Wakes the thread that sleeps on a word, if one does.
pub fn wake(word: &AtomicU32, wakers: Wakers) {
    system::wake(word, wakers);
}

#[cfg(target_os = "linux")]
mod system {
    use super::{AtomicU32, Duration, Wakers};

    fn op(op: libc::c_int, wakers: Wakers) -> libc::c_int {
        match wakers {
            Wakers::Threads => op | libc::FUTEX_PRIVATE_FLAG,
            Wakers::Processes => op,
        }
    }

    pub(super) fn wait(word: &AtomicU32, value: u32, timeout: Duration, wakers: Wakers) {
        let time = libc::timespec {
            tv_sec: timeout.as_secs().min(i64::MAX as u64) as libc::time_t,
            tv_nsec: timeout.subsec_nanos() as _,
        };
        let op = op(libc::FUTEX_WAIT, wakers);
        // SAFETY: the word is borrowed and aligned, and the time is ours; the call only reads them.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, &raw const time) };
    }

    pub(super) fn wake(word: &AtomicU32, wakers: Wakers) {
        let op = op(libc::FUTEX_WAKE, wakers);
        // SAFETY: the call uses only the word's address.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, 1) };
    }
}

/// Other systems have other calls; a sleeper looks again after a short rest.
#[cfg(not(target_os = "linux"))]
mod system {
    use super::{AtomicU32, Duration, Wakers};

    const REST: Duration = Duration::from_micros(50);

    pub(super) fn wait(_: &AtomicU32, _: u32, timeout: Duration, _: Wakers) {
        std::thread::sleep(timeout.min(REST));
    }

    pub(super) fn wake(_: &AtomicU32, _: Wakers) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_sleeper_is_woken_and_another_value_or_the_time_ends_the_sleep() {
        for wakers in [Wakers::Threads, Wakers::Processes] {
            let word = AtomicU32::new(1);
            sleep_while(&word, 1, Duration::from_millis(1), wakers);
            sleep_while(&word, 0, Duration::from_secs(3600), wakers);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while word.load(Ordering::SeqCst) == 1 {
                        sleep_while(&word, 1, Duration::from_secs(3600), wakers);
                    }
                });
                word.store(0, Ordering::SeqCst);
                wake(&word, wakers);
            });
        }
    }
}
