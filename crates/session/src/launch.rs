//! Starts the processes of a job on this host, and watches them until all have ended. If one is lost
//! and the run allows it, all are started again where the run can go on.
//!
//! What is done after a loss is decided by a [`Coordinator`](phalanx_recovery::Coordinator), which
//! knows no processes; here are its hands and eyes.

mod children;
mod crew;
mod folder;
mod held;
mod job_loop;
mod local;
mod sight;

use std::ffi::{OsStr, OsString};

use phalanx_comm::Token;
use phalanx_error::{Error, Problem, Result};

pub(crate) use children::{Children, Starting};
pub(crate) use crew::{Crew, Epoch};
pub(crate) use held::HeldMemory;
pub(crate) use job_loop::JobLoop;
pub(crate) use local::newest_step;
pub use sight::{FLIGHT, JOB, report, sights};

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
/// all. Gives the exit code of the job. A process that is lost is named with its rank, and started
/// again with all others if the run allows it; otherwise it is an error, and the others are ended.
pub fn launch(ranks: usize, program: &Launched) -> Result<u8> {
    let crew = local::LocalCrew::new(program)?;
    JobLoop::new(ranks, program, Box::new(crew))?.run()
}

/// A new token, which only processes of a job know.
pub(crate) fn new_token() -> Result<Token> {
    Token::random().map_err(|error| system("random numbers for a token", &error))
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
