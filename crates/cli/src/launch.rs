//! Ranks as processes: starting them, and taking part as one of them.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use clap::CommandFactory;
use phalanx::config::{Loaded, RankKind, closest};
use phalanx::error::{Error, Problem, Result};
use phalanx::session::hosts::{Agent, HostShare, launch_on_hosts};
use phalanx::session::{job, launch};

use crate::arg_values::Meet;
use crate::args::Args;

/// How a command goes on.
pub(crate) enum Begun {
    /// It runs in this process, which may be one of several.
    Here(Box<Loaded>),
    /// It has run in processes that this one started, which ended with this exit code.
    Done(u8),
}

/// Finds out what a configuration asks of ranks: joins the processes that others have started, or
/// starts them. A bad configuration is reported after that, because one process does it for all.
pub(crate) fn begin(loaded: Result<Loaded>) -> Result<Begun> {
    let timeout = |loaded: &Loaded| Duration::from_secs(loaded.config.run.timeout_s.get() as u64);
    let wait = loaded.as_ref().map_or(job::TIMEOUT, timeout);
    let kind = loaded.as_ref().map_or(RankKind::Threads, |loaded| loaded.config.run.ranks);
    let chosen = loaded.as_ref().is_ok_and(|loaded| loaded.by_user("run.ranks"));
    let other = chosen && matches!(kind, RankKind::Threads | RankKind::Mpi);
    if let (true, Ok(loaded), Some(processes)) = (other, &loaded, job::launched()) {
        return contradicts(loaded, processes);
    }
    if kind == RankKind::Threads && chosen {
        job::stay_alone();
        return Ok(Begun::Here(Box::new(loaded?)));
    }
    let loaded = match loaded {
        Ok(loaded) if kind == RankKind::Mpi => {
            job::join_mpi(wait, loaded.config.parallel.ranks().get())?;
            return Ok(Begun::Here(Box::new(loaded)));
        }
        // It may have asked for MPI; processes that cannot meet otherwise leave the report to rank 0.
        Err(error) => match job::environment() {
            Err(_) if job::is_later_rank() => return Ok(Begun::Done(error.exit_code())),
            Err(_) => return Err(error),
            Ok(_) => Err(error),
        },
        loaded => loaded,
    };
    let job = job::join(wait)?;
    let loaded = loaded?;
    let ranks = loaded.config.parallel.ranks().get();
    match kind {
        _ if job.is_some() => Ok(Begun::Here(Box::new(loaded))),
        RankKind::Processes if ranks > 1 => {
            let program = launch::this_program(std::env::args_os().skip(1))?;
            launch::launch(ranks, &program).map(Begun::Done)
        }
        RankKind::Env if ranks > 1 => {
            let problem = Problem::new("run.ranks = \"env\", but no variable says which rank this is")
                .because("expected RANK and WORLD_SIZE, or those of srun or mpirun")
                .fix("start it with torchrun --no-python, srun or phalanx launch, or set RANK, WORLD_SIZE, \
                      MASTER_ADDR and MASTER_PORT");
            Err(Error::refused(loaded.located("run.ranks", problem)))
        }
        _ => Ok(Begun::Here(Box::new(loaded))),
    }
}

/// Refuses, in one of these processes, a kind of ranks that does not fit how they were started.
fn contradicts(loaded: &Loaded, processes: usize) -> Result<Begun> {
    let kind = loaded.config.run.ranks;
    let why = match kind {
        RankKind::Mpi => "the MPI library knows only processes that its mpirun has started",
        _ => "each of them would be a run of its own",
    };
    let problem = Problem::new(format!(
        "run.ranks = \"{kind}\", but phalanx has launched {processes} processes"
    ));
    let problem = problem.because(why).fix(match kind {
        RankKind::Mpi => format!("mpirun -n {processes} phalanx …, or leave run.ranks out"),
        _ => "leave run.ranks out, or start the command without phalanx launch".to_owned(),
    });
    let error = Error::refused(loaded.located("run.ranks", problem));
    match job::is_later_rank() {
        true => Ok(Begun::Done(error.exit_code())),
        false => Err(error),
    }
}

/// `phalanx launch`: starts processes here, or on the hosts of a file by a remote shell, and gives the
/// exit code of the job.
pub(crate) fn run(
    ranks: usize,
    hosts: Option<(&Path, &str)>,
    exec: bool,
    words: &[OsString],
) -> Result<u8> {
    let program = program(exec, words)?;
    match hosts {
        None => launch::launch(ranks, &program),
        Some((file, shell)) => launch_on_hosts(ranks, file, shell, &program),
    }
}

/// The agent of a host whose place was given.
pub(crate) fn agent(count: usize, first: usize, ranks: usize, meet: &Meet) -> Result<Agent> {
    if first + count > ranks {
        let problem = format!("--first {first} and -n {count} are more than --ranks {ranks}");
        return Err(Error::refused(
            Problem::new(problem).fix("--ranks is the number of ranks on all hosts"),
        ));
    }
    let meet = (meet.host.clone(), meet.port);
    Ok(Agent::Placed(HostShare { first, count, ranks, meet }))
}

/// What is launched: a command of phalanx, or another program.
pub(crate) fn program(exec: bool, words: &[OsString]) -> Result<launch::Launched> {
    let [first, rest @ ..] = words else {
        return Err(Error::refused(Problem::new("no command is given")));
    };
    if exec {
        let (file, args) = (first.clone(), rest.to_vec());
        return Ok(launch::Launched { file, args, is_own: false });
    }
    let starters = ["launch", "agent"];
    let all = Args::command();
    let names = all.get_subcommands().map(|own| own.get_name().to_owned());
    let known: Vec<String> = names.filter(|name| !starters.contains(&&**name)).collect();
    match known.iter().any(|name| *first == **name) {
        true => launch::this_program(words),
        false => {
            let first = first.to_string_lossy();
            let near = closest(&first, known.iter().map(String::as_str));
            let problem =
                Problem::new(format!("`{first}` is not a command that phalanx can launch"))
                    .because(format!("commands: {}", known.join(", ")));
            Err(Error::refused(match near {
                Some(near) => problem.guess(format!("`{near}`")),
                None => problem.fix("for another program: phalanx launch -n N --exec PROGRAM …"),
            }))
        }
    }
}
