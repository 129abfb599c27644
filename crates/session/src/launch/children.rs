//! The processes of one epoch: starting them, asking how they ended, ending them.

use std::fs::{DirBuilder, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use phalanx_comm::{FlightRecorder, Token, names};
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::ProcessEnd;
use phalanx_sys::process::{Signal, end_with_parent, is_fault, pass_to, send, signal_name};

use super::Launched;

/// What all processes of an epoch are started with.
pub(super) struct Starting<'a> {
    pub(super) program: &'a Launched,
    pub(super) ranks: usize,
    pub(super) meet: PathBuf,
    pub(super) token: Token,
    pub(super) recorder: &'a FlightRecorder,
    /// The memory that the ranks take over, if they do.
    pub(super) memory: Option<&'a File>,
}

impl Starting<'_> {
    fn spawn(&self, rank: usize) -> std::io::Result<Child> {
        let Self { program, ranks, .. } = self;
        let mut command = Command::new(&program.file);
        command.args(&program.args);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        command.env(names::MEET, &self.meet).env(names::TOKEN, self.token.hex());
        command.env(names::RECORDER, self.recorder.fd().as_raw_fd().to_string());
        self.recorder.pass_to(&mut command);
        command.env_remove(names::MEMORY);
        if let Some(memory) = self.memory {
            command.env(names::MEMORY, memory.as_raw_fd().to_string());
            pass_to(memory.as_fd(), &mut command);
        }
        // A Ctrl-C of the terminal reaches this process alone, which passes it on.
        command.process_group(0);
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        end_with_parent(&mut command);
        command.spawn()
    }
}

struct Process {
    child: Child,
    ended: Option<ExitStatus>,
}

/// The processes of an epoch; those that still run are ended when it is dropped.
#[derive(Default)]
pub(super) struct Children {
    list: Vec<Process>,
}

impl Children {
    /// Starts all ranks. If one cannot be started, gives it and why; the others run.
    pub(super) fn start(&mut self, starting: &Starting<'_>) -> Result<(), (usize, std::io::Error)> {
        self.list.clear();
        for rank in 0..starting.ranks {
            let child = starting.spawn(rank).map_err(|error| (rank, error))?;
            self.list.push(Process { child, ended: None });
        }
        Ok(())
    }

    /// How many were started.
    pub(super) fn count(&self) -> usize {
        self.list.len()
    }

    /// The process of a rank, while it runs.
    pub(super) fn running(&self, rank: usize) -> Option<u32> {
        let process = self.list.get(rank)?;
        process.ended.is_none().then(|| process.child.id())
    }

    /// The ranks that have ended since the last look, and how. Panics are known by the recorder.
    pub(super) fn ended(&mut self, recorder: &FlightRecorder) -> Vec<(usize, ProcessEnd)> {
        let mut found = Vec::new();
        for (rank, Process { child, ended }) in self.list.iter_mut().enumerate() {
            if let (None, Ok(Some(status))) = (*ended, child.try_wait()) {
                *ended = Some(status);
                found.push((rank, end(status, recorder.rank(rank).has_panicked())));
            }
        }
        found
    }

    /// The exit code of a rank that has ended by itself.
    pub(super) fn code(&self, rank: usize) -> Option<i32> {
        self.list.get(rank)?.ended?.code()
    }

    pub(super) fn send(&self, signal: Signal) {
        let running = self.list.iter().filter(|process| process.ended.is_none());
        running.for_each(|process| send(&process.child, signal));
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.send(Signal::Kill);
        for process in self.list.iter_mut().filter(|process| process.ended.is_none()) {
            let _ = process.child.wait();
        }
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

/// A folder for sockets that only this user can enter; it is removed at the end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Result<Self> {
        // The path of a socket has at most 107 bytes.
        let temporary = std::env::temp_dir();
        let short = temporary.as_os_str().len() < 60;
        let root = if short { temporary } else { PathBuf::from("/tmp") };
        for number in 0.. {
            let path = root.join(format!("phalanx-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let problem = Problem::io("cannot create the folder", &path, &error);
                    return Err(Error::refused(
                        problem.fix("set TMPDIR to a folder that can be written"),
                    ));
                }
            }
        }
        unreachable!("numbers do not end")
    }

    /// Where the ranks of an epoch meet: nobody of another epoch comes there.
    pub(super) fn meet(&self, epoch: u64) -> PathBuf {
        self.path().join(format!("meet-{epoch}"))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
