//! Starts the processes of a job on this host, and watches them until all have ended.

use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use phalanx_comm::{Token, names};
use phalanx_error::{Error, Problem, Result};
use phalanx_sys::interrupt;
use phalanx_sys::process::{Signal, end_with_parent, send, signal_name};

/// How often processes are looked at.
const LOOK: Duration = Duration::from_millis(5);

/// How long the others have to end by themselves after one has failed, and then on request; less if it
/// was ended by a signal, because it can say nothing and people wait for its name.
const GRACE: Duration = Duration::from_secs(3);
const SHORT_GRACE: Duration = Duration::from_millis(300);

/// The program that the processes of a job run.
#[derive(Clone, Debug)]
pub struct Launched {
    /// Its file, or its name.
    pub file: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Whether it is the command itself, which reports its own errors.
    pub is_own: bool,
}

/// Starts a program as this many processes, each with its rank in its environment, and waits for
/// all. Gives the exit code of the job. A process that is ended by a signal is an error that names its
/// rank; the others are ended then.
pub fn launch(ranks: usize, program: &Launched) -> Result<u8> {
    let folder = Folder::new()?;
    let token = Token::random().map_err(|e| system("random numbers for a token", &e))?;
    let _listening = interrupt::listen_for_others();
    let mut job = Children { list: Vec::new(), program };
    for rank in 0..ranks {
        let mut command = Command::new(&program.file);
        command.args(&program.args);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        command.env(names::MEET, folder.0.join("meet")).env(names::TOKEN, token.hex());
        // A Ctrl-C of the terminal reaches this process alone, which passes it on.
        command.process_group(0);
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        end_with_parent(&mut command);
        let child = command.spawn().map_err(|error| {
            let file = Path::new(&program.file);
            Error::refused(Problem::io("cannot start", file, &error))
        })?;
        job.list.push(Process { child, ended: None });
    }
    job.watch()
}

/// The command itself, as a program for [`launch`].
pub fn this_program(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Launched> {
    let file = std::env::current_exe().map_err(|e| system("the file of this program", &e))?;
    let args = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
    Ok(Launched { file: file.into_os_string(), args, is_own: true })
}

fn system(what: &str, error: &std::io::Error) -> Error {
    Error::refused(Problem::new(format!("the system does not give {what}: {error}")))
}

/// A folder for sockets that only this user can enter; it is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
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
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Process {
    child: Child,
    ended: Option<ExitStatus>,
}

/// The processes of a job; those that still run are ended when it is dropped.
struct Children<'a> {
    list: Vec<Process>,
    program: &'a Launched,
}

impl Children<'_> {
    /// Waits for all, and passes on requests to stop.
    fn watch(mut self) -> Result<u8> {
        let (mut passed, mut failed) = (0, None);
        while self.list.iter().any(|process| process.ended.is_none()) {
            for (rank, process) in self.list.iter_mut().enumerate() {
                let Process { child, ended } = process;
                if let (None, Ok(Some(status))) = (*ended, child.try_wait()) {
                    *ended = Some(status);
                    if !status.success() && failed.is_none() {
                        let grace = if status.signal().is_some() { SHORT_GRACE } else { GRACE };
                        failed = Some((rank, Instant::now(), grace));
                    }
                }
            }
            if interrupt::requests() > passed {
                passed += 1;
                self.send(Signal::Interrupt);
            }
            match failed.map(|(_, since, grace)| (since.elapsed(), grace)) {
                Some((time, grace)) if time > 2 * grace => self.send(Signal::Kill),
                Some((time, grace)) if time > grace => self.send(Signal::Terminate),
                _ => {}
            }
            std::thread::sleep(LOOK);
        }
        let ranks = self.list.len();
        let status = |rank: usize| self.list[rank].ended;
        let Some((first, ..)) = failed else { return Ok(0) };
        if let Some(signal) = status(first).and_then(|status| status.signal()) {
            return Err(Error::failed(ended_by(signal, first, ranks)));
        }
        let codes = self.list.iter().filter_map(|process| process.ended?.code());
        let code =
            if self.program.is_own { codes.max() } else { status(first).and_then(|s| s.code()) };
        let code = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        match self.program.is_own {
            // It has said why.
            true => Ok(code),
            false => {
                let name = Path::new(&self.program.file).display();
                Err(Error::failed(Problem::new(format!(
                    "rank {first} of {ranks} ended with exit code {code}: {name}"
                ))))
            }
        }
    }

    fn send(&self, signal: Signal) {
        let running = self.list.iter().filter(|process| process.ended.is_none());
        running.for_each(|process| send(&process.child, signal));
    }
}

impl Drop for Children<'_> {
    fn drop(&mut self) {
        self.send(Signal::Kill);
        for process in self.list.iter_mut().filter(|process| process.ended.is_none()) {
            let _ = process.child.wait();
        }
    }
}

fn ended_by(signal: i32, rank: usize, ranks: usize) -> Problem {
    let name = signal_name(signal);
    let problem =
        Problem::new(format!("the process of rank {rank} of {ranks} was ended by {name}"))
            .because("the other ranks cannot go on without it, and were ended");
    match name.as_str() {
        "SIGKILL" => {
            problem.fix("if nobody sent it, memory was short: see dmesg, or use less of it")
        }
        _ => problem.fix("please report it, together with the command and the configuration"),
    }
}
