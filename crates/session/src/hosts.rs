//! The processes of a job on several hosts. Each host has an agent, which is this program: it starts the
//! host's ranks and watches them. One process coordinates: the launcher, which starts agents by a remote
//! shell and speaks with them over its input and output; or, where another program such as srun starts
//! agents, the one of the first host, to which the others connect.
//!
//! A host whose agent ends, or no longer answers, is lost with its ranks. The job goes on like after
//! the loss of a rank: with the hosts that are left, or with one that comes in its place.

mod agent;
mod crew;
mod frame;
mod gathering;
mod link;
mod remote;

use std::io::BufRead;
use std::path::Path;

pub use phalanx_comm::HostShare;
use phalanx_comm::{BadEnvironment, BadHostFile, ListedHost, Token, names};
use phalanx_error::{Error, Problem, Result};

use crate::launch::{JobLoop, Launched, new_token};
use agent::AgentLoop;
use crew::{Host, HostCrew};
pub(crate) use frame::{HeldVersion, read_frame, write_frame};
use link::Link;
pub use remote::REMOTE_SHELL;
use remote::RemoteShell;

/// Starts a program as this many processes on the hosts that a file lists, and waits for all. Gives the
/// exit code of the job.
pub fn launch_on_hosts(ranks: usize, file: &Path, shell: &str, program: &Launched) -> Result<u8> {
    let hosts = read_hosts(file, ranks)?.into_iter().map(|listed| {
        let (name, address) = (listed.name.clone(), listed.address().to_owned());
        Host::new(name, address, listed.slots, None)
    });
    let shell = RemoteShell::new(shell, program, new_token()?)?;
    let mut crew = HostCrew::new(hosts.collect(), Some(shell), None, ranks, any_port());
    match crew.come()? {
        Some(code) => Ok(code),
        None => JobLoop::spread(ranks, program, Box::new(crew))?.run(),
    }
}

/// What an agent does on its host.
#[derive(Clone, Debug)]
pub enum Agent {
    /// What a launcher says over its standard input.
    Led,
    /// It has these ranks at first, and finds the others by itself: the agent of the first rank
    /// coordinates.
    Placed(HostShare),
}

impl Agent {
    /// The agent of a host of a Slurm step, where every host has this many ranks.
    pub fn of_slurm(count: usize) -> Result<Self> {
        let share = HostShare::of_slurm(&|name| std::env::var(name).ok(), count);
        let share = share.map_err(|BadEnvironment { problem, fix }| {
            Error::refused(Problem::new(problem).fix(fix))
        })?;
        Ok(Self::Placed(share))
    }

    /// Starts the host's ranks, and waits for them.
    pub fn run(&self, program: &Launched) -> Result<u8> {
        match self {
            Self::Led => {
                let token = read_token()?;
                let link = Link::new(std::io::stdin(), std::io::stdout()).map_err(no_thread)?;
                AgentLoop::new(program, token, link, true)?.run()
            }
            Self::Placed(share) => {
                let (host, port) = &share.meet;
                let given = std::env::var(names::TOKEN).ok();
                let known =
                    |text: String| Token::from_hex(&text).unwrap_or_else(|| Token::of(&text));
                let token = given.map_or_else(|| Token::of(&format!("{host}:{port}")), known);
                gathering::run(share, token, program)
            }
        }
    }
}

fn no_thread(error: std::io::Error) -> Error {
    Error::refused(Problem::new(format!("the system gives no thread: {error}")))
}

/// The token, which is the first line that a launcher says.
fn read_token() -> Result<Token> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    let token = read.ok().and_then(|_| Token::from_hex(line.trim()));
    token.ok_or_else(|| {
        let problem = Problem::new("the standard input of an agent does not begin with a token");
        Error::refused(problem.fix("agents with --led are started by phalanx launch --hosts"))
    })
}

/// The hosts of a file.
fn read_hosts(file: &Path, ranks: usize) -> Result<Vec<ListedHost>> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        let problem = Problem::io("cannot read the hosts in", file, &error);
        Error::refused(problem.fix("give a file with a host on each line: name slots=4"))
    })?;
    ListedHost::of_file(&text, ranks).map_err(|BadHostFile { line, problem, fix }| {
        let place = match line {
            Some(line) => format!("{}, line {line}", file.display()),
            None => file.display().to_string(),
        };
        Error::refused(Problem::new(format!("{place}: {problem}")).fix(fix))
    })
}

/// A port that another job hardly has, below those that systems give out by themselves.
fn any_port() -> u16 {
    10_000 + (std::process::id() % 22_000) as u16
}
