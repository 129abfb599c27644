//! Processes that are watched to their end and not started again: the ranks of one of several hosts,
//! and the remote shells that reach the hosts.

use std::io::Write;
use std::ops::Range;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx_error::{Error, Problem, Result};
use phalanx_sys::interrupt;
use phalanx_sys::process::{Signal, end_with_parent, send, signal_name};

use super::Launched;
use crate::hosts::remote_outcome;

/// How often processes are looked at.
const LOOK: Duration = Duration::from_millis(5);

/// How long the others have to end by themselves after one has failed, and then on request; less if it
/// was ended by a signal, because it can say nothing and people wait for its name.
const GRACE: Duration = Duration::from_secs(3);
const SHORT_GRACE: Duration = Duration::from_millis(300);

/// Starts the processes of these ranks, of all that there are, and waits for them.
pub(crate) fn start_ranks(
    local: Range<usize>,
    ranks: usize,
    variables: impl Fn(usize) -> Vec<(&'static str, String)>,
    program: &Launched,
    orders: &Orders,
) -> Result<u8> {
    let mut job = WatchedProcesses::new(program, orders);
    let _listening = interrupt::listen_for_others();
    for rank in local {
        let mut command = Command::new(&program.file);
        command.args(&program.args).envs(variables(rank));
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        job.start(command, format!("rank {rank} of {ranks}"), Control::Signals)?;
    }
    job.watch()
}

/// What another program tells the launcher of processes, besides signals.
#[derive(Default)]
pub(crate) struct Orders {
    /// How many times it has asked to stop.
    pub(crate) interrupts: AtomicUsize,
    /// It is not there any more: all must end.
    pub(crate) gone: AtomicBool,
}

/// How a process is asked to end.
pub(crate) enum Control {
    /// By signals.
    Signals,
    /// By lines of its standard input, whose end ends it.
    Lines(Option<ChildStdin>),
}

struct Process {
    child: Child,
    /// `rank 1 of 4`, or where it runs.
    name: String,
    control: Control,
    ended: Option<ExitStatus>,
}

/// The processes of a job; those that still run are ended when it is dropped.
pub(crate) struct WatchedProcesses<'a> {
    list: Vec<Process>,
    program: &'a Launched,
    orders: &'a Orders,
}

impl<'a> WatchedProcesses<'a> {
    pub(crate) fn new(program: &'a Launched, orders: &'a Orders) -> Self {
        Self { list: Vec::new(), program, orders }
    }

    /// Starts one more.
    pub(crate) fn start(&mut self, command: Command, name: String, control: Control) -> Result<()> {
        let mut command = command;
        // A Ctrl-C of the terminal reaches this process alone, which passes it on.
        command.process_group(0);
        end_with_parent(&mut command);
        let mut child = command.spawn().map_err(|error| {
            let file = Path::new(command.get_program());
            Error::refused(Problem::io("cannot start", file, &error))
        })?;
        let control = match control {
            Control::Signals => Control::Signals,
            Control::Lines(_) => Control::Lines(child.stdin.take()),
        };
        self.list.push(Process { child, name, control, ended: None });
        Ok(())
    }

    /// Tells the process that was started last something, as a line.
    pub(crate) fn tell(&mut self, line: &str) {
        if let Some(Process { control: Control::Lines(Some(input)), .. }) = self.list.last_mut() {
            // If it has ended, that is noticed by waiting for it.
            let _ = writeln!(input, "{line}");
        }
    }

    /// Waits for all, and passes on requests to stop.
    pub(crate) fn watch(mut self) -> Result<u8> {
        let (mut passed, mut failed) = (0, None);
        while self.list.iter().any(|process| process.ended.is_none()) {
            for (at, process) in self.list.iter_mut().enumerate() {
                let Process { child, ended, .. } = process;
                if let (None, Ok(Some(status))) = (*ended, child.try_wait()) {
                    *ended = Some(status);
                    if !status.success() && failed.is_none() {
                        let grace = if status.signal().is_some() { SHORT_GRACE } else { GRACE };
                        failed = Some((Some(at), Instant::now(), grace));
                    }
                }
            }
            if failed.is_none() && self.orders.gone.load(Ordering::Relaxed) {
                failed = Some((None, Instant::now() - SHORT_GRACE, SHORT_GRACE));
            }
            if interrupt::requests() + self.orders.interrupts.load(Ordering::Relaxed) > passed {
                passed += 1;
                self.send(Signal::Interrupt);
            }
            match failed.map(|(_, since, grace)| (since.elapsed(), grace)) {
                Some((time, grace)) if time > 2 * grace => self.send(Signal::Kill),
                Some((time, grace)) if time >= grace => self.send(Signal::Terminate),
                _ => {}
            }
            std::thread::sleep(LOOK);
        }
        match failed {
            None => Ok(0),
            Some((None, ..)) => Ok(1),
            Some((Some(first), ..)) => self.outcome(first),
        }
    }

    /// How a job ends in which a process has failed before all others.
    fn outcome(&self, first: usize) -> Result<u8> {
        let Process { name, ended, control, .. } = &self.list[first];
        if let Some(signal) = ended.and_then(|status| status.signal()) {
            return Err(Error::failed(ended_by(signal, name)));
        }
        let codes = self.list.iter().filter_map(|process| process.ended?.code());
        let code = match self.program.is_own {
            true => codes.max(),
            false => ended.and_then(|status| status.code()),
        };
        let code = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        match (control, self.program.is_own) {
            (Control::Lines(_), _) => remote_outcome(name, ended.and_then(|status| status.code())),
            // It has said why.
            (_, true) => Ok(code),
            (_, false) => {
                let file = Path::new(&self.program.file).display();
                let problem = format!("{name} ended with exit code {code}: {file}");
                Err(Error::failed(Problem::new(problem)))
            }
        }
    }

    fn send(&mut self, signal: Signal) {
        for process in self.list.iter_mut().filter(|process| process.ended.is_none()) {
            match (&mut process.control, signal) {
                (Control::Lines(Some(input)), Signal::Interrupt) => {
                    let _ = writeln!(input, "{INTERRUPT}");
                }
                (Control::Lines(input), Signal::Interrupt | Signal::Terminate) => *input = None,
                (Control::Signals, _) | (_, Signal::Kill) => send(&process.child, signal),
            }
        }
    }
}

impl Drop for WatchedProcesses<'_> {
    fn drop(&mut self) {
        self.send(Signal::Kill);
        for process in self.list.iter_mut().filter(|process| process.ended.is_none()) {
            let _ = process.child.wait();
        }
    }
}

/// What a launcher writes to the agents of hosts when it is asked to stop.
pub(crate) const INTERRUPT: &str = "interrupt";

fn ended_by(signal: i32, process: &str) -> Problem {
    let name = signal_name(signal);
    let problem = Problem::new(format!("the process of {process} was ended by {name}"))
        .because("the other ranks cannot go on without it, and were ended");
    match name.as_str() {
        "SIGKILL" => {
            problem.fix("if nobody sent it, memory was short: see dmesg, or use less of it")
        }
        _ => problem.fix("please report it, together with the command and the configuration"),
    }
}
