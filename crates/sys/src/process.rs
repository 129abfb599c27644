//! Processes that this one starts: they end with it, and get signals from it.

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
    }
}
