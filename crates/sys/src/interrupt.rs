//! Handling of Ctrl-C: after the first, a program finishes what it is doing; a second one ends it
//! at once, or, while a file is being written, ends the writing cleanly.
//!
//! A lost terminal (SIGHUP) and the warnings of batch systems (SIGUSR1, SIGXCPU) ask for the same,
//! but only once: they come several times without anybody being impatient.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// How many times the user has asked to stop since listening began.
static ASKED: AtomicUsize = AtomicUsize::new(0);
/// Whether requests are passed on to other processes.
static PASSING: AtomicBool = AtomicBool::new(false);
/// Whether the last request was Ctrl-C itself.
static BY_KEYS: AtomicBool = AtomicBool::new(false);
/// Files that are being written.
static WRITING: AtomicUsize = AtomicUsize::new(0);

/// While this value lives, Ctrl-C and the other signals that ask to stop are recorded, and
/// [`requested`] reports them.
#[derive(Debug)]
pub struct Listening(());

/// Begins to listen. Signals that were ignored at the start of the process stay ignored.
pub fn listen() -> Listening {
    ASKED.store(0, Relaxed);
    system::install();
    Listening(())
}

impl Drop for Listening {
    fn drop(&mut self) {
        system::remove();
    }
}

/// The same for a program that passes these requests on to others, and ends when they have: a second
/// request does not end it.
pub fn listen_for_others() -> Listening {
    PASSING.store(true, Relaxed);
    listen()
}

/// How many times the user has asked to stop.
pub fn requests() -> usize {
    ASKED.load(Relaxed)
}

/// Whether the last request was Ctrl-C itself (SIGINT), which processes in the background of a shell ignore,
/// and not one of the other signals.
pub fn by_keys() -> bool {
    BY_KEYS.load(Relaxed)
}

/// Whether the user has asked to stop.
pub fn requested() -> bool {
    ASKED.load(Relaxed) > 0
}

/// Whether the user has asked a second time, and does not want to wait for a file.
pub fn requested_twice() -> bool {
    ASKED.load(Relaxed) > 1
}

/// Marks that a file is being written, until it is dropped.
pub(crate) struct Writing(());

impl Writing {
    pub(crate) fn begin() -> Self {
        WRITING.fetch_add(1, Relaxed);
        Self(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        WRITING.fetch_sub(1, Relaxed);
    }
}

/// Lets a file that grows beyond the limit of this process (`ulimit -f`) be an error of the write,
/// instead of a signal that ends the process without a word.
pub fn survive_file_limit() {
    system::survive_file_limit();
}

#[cfg(unix)]
mod system {
    use super::{ASKED, BY_KEYS, PASSING, Relaxed, WRITING};

    const SIGNALS: [libc::c_int; 5] =
        [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGXCPU];

    pub(super) fn install() {
        let handler = on_signal as extern "C" fn(libc::c_int);
        for signal in SIGNALS {
            // SAFETY: the handler only touches atomics and calls functions that POSIX allows in
            // handlers; the earlier setting is restored if it was to ignore the signal.
            unsafe {
                if libc::signal(signal, handler as libc::sighandler_t) == libc::SIG_IGN {
                    libc::signal(signal, libc::SIG_IGN);
                }
            }
        }
    }

    pub(super) fn remove() {
        let handler = on_signal as extern "C" fn(libc::c_int);
        for signal in SIGNALS {
            // SAFETY: only our own handler is replaced, by the default.
            unsafe {
                let before = libc::signal(signal, libc::SIG_DFL);
                if before != handler as libc::sighandler_t {
                    libc::signal(signal, before);
                }
            }
        }
    }

    pub(super) fn survive_file_limit() {
        // SAFETY: ignoring this signal changes only what a failing write returns.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }

    extern "C" fn on_signal(signal: libc::c_int) {
        BY_KEYS.store(signal == libc::SIGINT, Relaxed);
        if !matches!(signal, libc::SIGINT | libc::SIGTERM) {
            ASKED.fetch_max(1, Relaxed);
            return;
        }
        // The second ends the process unless a file is being written, which then stops; the third
        // always ends it.
        let before = ASKED.fetch_add(1, Relaxed);
        let busy = WRITING.load(Relaxed) > 0 || PASSING.load(Relaxed);
        if before >= 2 || before == 1 && !busy {
            // SAFETY: both calls may be made in handlers; the signal takes effect on return.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
    }
}

#[cfg(not(unix))]
mod system {
    pub(super) fn install() {}
    pub(super) fn remove() {}
    pub(super) fn survive_file_limit() {}
}
