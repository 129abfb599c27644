//! The processes of one epoch: starting them, asking how they ended, ending them.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_comm::{FlightRecorder, names};
use phalanx_recovery::ProcessEnd;
use phalanx_sys::process::{Signal, end_with_parent, is_fault, pass_to, send, signal_name};

use super::Launched;
use super::held::HeldMemory;

/// How long the last output of a process may take.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Passes on what a process prints, until it closes its output.
type Forward<'a> = &'a dyn Fn(ChildStdout) -> std::io::Result<JoinHandle<()>>;

/// What the processes of an epoch on one host are started with.
pub(crate) struct Starting<'a> {
    pub(crate) program: &'a Launched,
    /// The ranks of this host.
    pub(crate) ranks: Range<usize>,
    /// The variables of a rank.
    pub(crate) variables: &'a dyn Fn(usize) -> Vec<(&'static str, String)>,
    pub(crate) recorder: &'a FlightRecorder,
    /// The memory that the ranks take over, if they do.
    pub(crate) memory: &'a HeldMemory,
    /// Where their output goes, if not to that of this process. Then they have no input either.
    pub(crate) output: Option<Forward<'a>>,
}

impl Starting<'_> {
    fn spawn(&self, rank: usize) -> std::io::Result<Process> {
        let mut command = Command::new(&self.program.file);
        command.args(&self.program.args).envs((self.variables)(rank));
        command.env(names::RECORDER, self.recorder.fd().as_raw_fd().to_string());
        self.recorder.pass_to(&mut command);
        command.env_remove(names::MEMORY);
        if let Some(memory) = self.memory.of(rank) {
            command.env(names::MEMORY, memory.as_raw_fd().to_string());
            pass_to(memory.as_fd(), &mut command);
        }
        // A Ctrl-C of the terminal reaches this process alone, which passes it on.
        command.process_group(0);
        if rank > 0 || self.output.is_some() {
            command.stdin(Stdio::null());
        }
        if self.output.is_some() {
            command.stdout(Stdio::piped());
        }
        end_with_parent(&mut command);
        let mut child = command.spawn()?;
        let forwarded = self.output.zip(child.stdout.take());
        let forwarded = forwarded.map(|(forward, output)| forward(output)).transpose()?;
        Ok(Process { child, forwarded, ended: None })
    }
}

struct Process {
    child: Child,
    /// What passes on its output.
    forwarded: Option<JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

/// The processes of an epoch on one host; those that still run are ended when it is dropped.
#[derive(Default)]
pub(crate) struct Children {
    first: usize,
    list: Vec<Process>,
}

impl Children {
    /// Starts all ranks. If one cannot be started, gives it and why; the others run.
    pub(crate) fn start(&mut self, starting: &Starting<'_>) -> Result<(), (usize, std::io::Error)> {
        self.end_all();
        self.list.clear();
        self.first = starting.ranks.start;
        for rank in starting.ranks.clone() {
            self.list.push(starting.spawn(rank).map_err(|error| (rank, error))?);
        }
        Ok(())
    }

    /// The process of a rank, while it runs.
    pub(super) fn running(&self, rank: usize) -> Option<u32> {
        let process = self.list.get(rank.checked_sub(self.first)?)?;
        process.ended.is_none().then(|| process.child.id())
    }

    /// The ranks that have ended since the last look, and how. Panics are known by the recorder.
    pub(crate) fn ended(&mut self, recorder: &FlightRecorder) -> Vec<(usize, ProcessEnd)> {
        let mut found = Vec::new();
        for (at, Process { child, forwarded, ended }) in self.list.iter_mut().enumerate() {
            if let (None, Ok(Some(status))) = (*ended, child.try_wait()) {
                *ended = Some(status);
                // All that it has printed is on its way before its end is known.
                forwarded.take().into_iter().for_each(|thread| wait_a_little(&thread));
                let rank = self.first + at;
                found.push((rank, end(status, recorder.rank(rank).has_panicked())));
            }
        }
        found
    }

    /// The exit code of a rank that has ended by itself.
    pub(super) fn code(&self, rank: usize) -> Option<i32> {
        self.list.get(rank.checked_sub(self.first)?)?.ended?.code()
    }

    pub(crate) fn send(&self, signal: Signal) {
        let running = self.list.iter().filter(|process| process.ended.is_none());
        running.for_each(|process| send(&process.child, signal));
    }
}

impl Children {
    /// Ends those that still run, and waits until they have ended.
    fn end_all(&mut self) {
        self.send(Signal::Kill);
        for process in self.list.iter_mut().filter(|process| process.ended.is_none()) {
            let _ = process.child.wait();
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end_all();
    }
}

fn end(status: ExitStatus, panicked: bool) -> ProcessEnd {
    match (status.signal(), status.code()) {
        (Some(signal), _) if is_fault(signal) => ProcessEnd::Broken(signal_name(signal)),
        (Some(signal), _) => ProcessEnd::Killed(signal_name(signal)),
        (None, Some(0)) => ProcessEnd::Well,
        (None, _) if panicked => ProcessEnd::Broken("a panic".to_owned()),
        (None, code) => {
            ProcessEnd::Failed(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
        }
    }
}

/// Waits for a thread that reads the output of a process that has ended. Its own children may
/// hold the output open; they are not waited for.
fn wait_a_little(thread: &JoinHandle<()>) {
    let start = Instant::now();
    while !thread.is_finished() && start.elapsed() < LAST_OUTPUT {
        std::thread::sleep(Duration::from_millis(1));
    }
}
