//! Processes that this one starts: they end with it, and get signals and files from it.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::process::{Child, Command};

/// A signal that asks a process to end, or ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// A request to end.
    Terminate,
    /// Ends it at once.
    Kill,
}

/// Lets the system end the process when the thread that starts it ends, however that happens.
pub fn end_with_parent(command: &mut Command) {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::process::CommandExt;
        let parent = std::process::id() as libc::pid_t;
        // SAFETY: between fork and exec only these two system calls are made, which allocate nothing
        // and take no lock.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // The parent may have ended before the call.
                if libc::getppid() != parent {
                    libc::_exit(1);
                }
                Ok(())
            });
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = command;
}

/// Lets the process that a command starts inherit a file descriptor, under the same number.
pub fn pass_to(fd: BorrowedFd<'_>, command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let number = fd.as_raw_fd();
    // SAFETY: between fork and exec only one system call is made, in the new process alone.
    unsafe {
        command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
}

/// Whether a process is stopped, by SIGSTOP or a debugger; not where the system does not say so.
pub fn is_stopped(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name of the program comes before, in parentheses, and may hold anything.
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

/// Whether a process of this number exists.
pub fn exists(process: u32) -> bool {
    std::path::Path::new(&format!("/proc/{process}/stat")).exists()
}

/// What a process can do to itself, for tests of what others make of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It ends at once, as if memory had run out.
    Kill,
    /// It ends as if it had touched memory that is not its own.
    Segfault,
    /// It stops until it is continued.
    Stop,
}

/// Does this to the calling process.
pub fn suffer(fate: Fate) {
    let signal = match fate {
        Fate::Kill => libc::SIGKILL,
        Fate::Segfault => libc::SIGSEGV,
        Fate::Stop => libc::SIGSTOP,
    };
    // SAFETY: both calls only change what becomes of this process; a handler that would take the
    // signal for an overflow of the stack is removed first. The signal goes to this thread, which does
    // nothing more before it takes effect.
    unsafe {
        if fate == Fate::Segfault {
            libc::signal(signal, libc::SIG_DFL);
        }
        libc::raise(signal);
    }
}

/// Sends a signal to a process that was started here and has not been waited for.
pub fn send(child: &Child, signal: Signal) {
    let signal = match signal {
        Signal::Interrupt => libc::SIGINT,
        Signal::Terminate => libc::SIGTERM,
        Signal::Kill => libc::SIGKILL,
    };
    // SAFETY: the process is a child that was not reaped, so its number is not another's.
    unsafe { libc::kill(child.id() as libc::pid_t, signal) };
}

/// Whether a signal ends a process because of a mistake of its own, after which its memory may hold
/// anything: SIGSEGV, SIGBUS and the like.
pub fn is_fault(signal: i32) -> bool {
    let faults = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGABRT,
        libc::SIGFPE,
        libc::SIGTRAP,
        libc::SIGSYS,
    ];
    faults.contains(&signal)
}

/// The name of a signal, such as SIGKILL.
pub fn signal_name(signal: i32) -> String {
    let known = [
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGILL, "SIGILL"),
        (libc::SIGABRT, "SIGABRT"),
        (libc::SIGBUS, "SIGBUS"),
        (libc::SIGFPE, "SIGFPE"),
        (libc::SIGKILL, "SIGKILL"),
        (libc::SIGSEGV, "SIGSEGV"),
        (libc::SIGPIPE, "SIGPIPE"),
        (libc::SIGTERM, "SIGTERM"),
        (libc::SIGQUIT, "SIGQUIT"),
        (libc::SIGTRAP, "SIGTRAP"),
        (libc::SIGSYS, "SIGSYS"),
    ];
    let name = known.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name);
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_child_gets_its_signal() {
        for (signal, name) in [(Signal::Terminate, "SIGTERM"), (Signal::Kill, "SIGKILL")] {
            let mut command = Command::new("sleep");
            end_with_parent(command.arg("60"));
            let mut child = command.spawn().unwrap();
            send(&child, signal);
            assert_eq!(signal_name(child.wait().unwrap().signal().unwrap()), name);
        }
        assert_eq!(signal_name(63), "signal 63");
        assert!(is_fault(libc::SIGSEGV) && !is_fault(libc::SIGKILL));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_stopped_process_is_seen() {
        let mut command = Command::new("sh");
        end_with_parent(command.args(["-c", "kill -STOP $$"]));
        let mut child = command.spawn().unwrap();
        let start = std::time::Instant::now();
        while !is_stopped(child.id()) {
            assert!(start.elapsed().as_secs() < 60, "it does not stop");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(exists(child.id()) && !is_stopped(std::process::id()));
        send(&child, Signal::Kill);
        child.wait().unwrap();
        assert!(!exists(child.id()));
    }
}
