//! The job that this process is one of: its other processes run the same program, each with its own
//! rank.
//!
//! A process belongs to one job for all its life, or to none. It joins it before it makes a session;
//! from then on a session whose layout has as many ranks as the job runs on all processes, and a
//! session of one rank (the reference of `verify`) runs in each of them.

use std::fmt;
use std::io::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use phalanx_comm::{
    BadEnvironment, CommError, Environment, Failure, FlightRecorder, Membership, Mpi, find_shim,
    names,
};
use phalanx_error::{Error, Problem, Result};

/// How long processes wait for each other, if no configuration says it.
pub const TIMEOUT: Duration = Duration::from_secs(100);

/// How long a process that ends waits for another's last words.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long it may take to notice that another process has died.
const SUDDEN_END: Duration = Duration::from_millis(100);

/// How much longer a rank waits for others if the launcher watches them all: it knows more, and
/// speaks first.
pub(crate) const LONGER: Duration = Duration::from_secs(5);

static RECORDER: OnceLock<Option<Arc<FlightRecorder>>> = OnceLock::new();

/// How long the processes of an MPI job that has failed have to leave it.
const LEAVING: Duration = Duration::from_secs(5);

static JOB: OnceLock<Option<Arc<Membership>>> = OnceLock::new();

/// Who this process is, by its environment; nothing if it is alone.
pub fn environment() -> Result<Option<Environment>> {
    let found = Environment::find(&|name| std::env::var(name).ok());
    found.map_err(|BadEnvironment { problem, fix }| Error::refused(Problem::new(problem).fix(fix)))
}

/// Meets the other processes of the job that the environment names, at the first call; waits at most
/// this long for them. Gives the job, or nothing if this process is alone.
pub fn join(wait: Duration) -> Result<Option<Arc<Membership>>> {
    if let Some(known) = JOB.get() {
        return Ok(known.clone());
    }
    let tell = |text: &str| drop(writeln!(std::io::stderr(), "note: {text}"));
    let Some(own) = environment()? else {
        // A launcher may watch a process that is alone, too.
        record(0, std::env::var_os(names::MEET).is_some())?;
        return Ok(JOB.get_or_init(|| None).clone());
    };
    record(own.rank, own.launched)?;
    let job =
        Membership::meet_telling(&own, wait, &tell).map_err(|error| unmet(error, own.ranks))?;
    Ok(JOB.get_or_init(|| Some(Arc::new(job))).clone())
}

/// Meets the other processes of an MPI job, for a layout with this many ranks, at the first call. Gives
/// the job, or nothing if one rank is all.
pub fn join_mpi(wait: Duration, ranks: usize) -> Result<Option<Arc<Membership>>> {
    if let Some(known) = JOB.get() {
        return Ok(known.clone());
    }
    let mpi = find_shim().and_then(|shim| Mpi::join(&shim)).map_err(|error| unmet(error, ranks))?;
    if mpi.ranks() > 1 {
        let job = Membership::meet_over(&mpi, wait).map_err(|error| unmet(error, ranks))?;
        return Ok(JOB.get_or_init(|| Some(Arc::new(job))).clone());
    }
    let place = Environment::place(&|name| std::env::var(name).ok());
    match place.filter(|(.., ranks)| *ranks > 1) {
        None if ranks == 1 => Ok(JOB.get_or_init(|| None).clone()),
        None => Err(Error::refused(
            Problem::new(format!("ranks are to be MPI's, but {} knows one process", mpi.version()))
                .fix(format!("start it with mpirun -n {ranks}")),
        )),
        Some(([_, name], _, ranks)) => Err(Error::refused(
            Problem::new(format!("{name} = {ranks}, but {} knows one process", mpi.version()))
                .because("it was started by another program than the mpirun of that library")
                .fix("start it with that mpirun, or set MPICC to the mpicc of the library that started it"),
        )),
    }
}

/// Why processes did not come together.
fn unmet(error: CommError, ranks: usize) -> Error {
    match error {
        CommError::Aborted(failure) => elsewhere(failure, ranks),
        CommError::Meeting { problem, fix } => Error::refused(Problem::new(problem).fix(fix)),
        error => Error::refused(Problem::new(error.to_string())),
    }
}

/// Opens the recorder that the launcher gave to this process, if it did, and lets a panic be known
/// there: what the process has in memory is not to be trusted then.
fn record(rank: usize, launched: bool) -> Result<()> {
    let given = std::env::var(names::RECORDER).ok().filter(|_| launched);
    let Some(given) = given else {
        RECORDER.get_or_init(|| None);
        return Ok(());
    };
    let told = |why: String| {
        let problem =
            Problem::new(format!("{} = {given} is not a recorder: {why}", names::RECORDER));
        Error::refused(
            problem.fix("start ranks with phalanx launch, and leave this variable alone"),
        )
    };
    let number = given.parse().map_err(|_| told("not a number".to_owned()))?;
    let recorder = FlightRecorder::open(number).map_err(|error| told(error.to_string()))?;
    if rank >= recorder.ranks() {
        return Err(told(format!("it has {} ranks", recorder.ranks())));
    }
    recorder.rank(rank).set_process(std::process::id());
    let recorder = Arc::new(recorder);
    let words = recorder.clone();
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        words.rank(rank).panic();
        before(info);
    }));
    RECORDER.get_or_init(|| Some(recorder));
    Ok(())
}

/// Where the processes of the job record what they do, if a launcher watches them.
pub fn recorder() -> Option<&'static Arc<FlightRecorder>> {
    RECORDER.get().and_then(Option::as_ref)
}

/// Makes this process one that is alone, whatever the environment says.
pub fn stay_alone() {
    JOB.get_or_init(|| None);
}

/// How many ranks of a job of so many share the cores of this host.
pub fn ranks_here(ranks: usize) -> usize {
    let own = environment().ok().flatten().filter(|own| own.ranks == ranks);
    own.and_then(|own| own.local).map_or(ranks, |(_, count)| count)
}

/// The physical cores of this host, as far as this process may use them.
pub fn cores_here() -> usize {
    phalanx_sys::computing_cores()
}

/// The physical cores of all hosts of the job, if all have as many as this one.
pub fn cores() -> usize {
    let own = cores_here();
    let spread = environment().ok().flatten().and_then(|job| Some((job.ranks, job.local?.1)));
    spread.map_or(own, |(ranks, here)| own * ranks / here.max(1))
}

/// How many processes `phalanx launch` or `phalanx agent` has started, if this is one of several.
pub fn launched() -> Option<usize> {
    environment().ok().flatten().filter(|own| own.launched).map(|own| own.ranks)
}

/// Whether variables say that this process is a rank other than 0.
pub fn is_later_rank() -> bool {
    Environment::place(&|name| std::env::var(name).ok()).is_some_and(|(_, rank, _)| rank > 0)
}

/// The job that this process has joined.
pub fn joined() -> Option<&'static Arc<Membership>> {
    JOB.get().and_then(Option::as_ref)
}

/// Whether this process writes files and reports: the process of rank 0, and one that is alone.
pub fn is_first() -> bool {
    joined().is_none_or(|job| job.rank() == 0)
}

/// Refuses a layout that has another number of ranks than the job has processes.
pub fn fits(ranks: usize) -> Result<()> {
    let Some(job) = joined().filter(|job| job.ranks() != ranks) else { return Ok(()) };
    let processes = job.ranks();
    Err(Error::refused(
        Problem::new(format!(
            "the layout has {ranks} rank{}, but the job has {processes} processes",
            if ranks == 1 { "" } else { "s" }
        ))
        .because("every process is one rank of the layout: of tp × cp × dp for each stage, or each holder of a stage")
        .fix(format!(
            "set parallel.dp, tp, cp, pp and holders so that the layout has {processes} ranks, or start {}",
            if ranks == 1 { "one process".to_owned() } else { format!("{ranks} processes") }
        )),
    ))
}

/// The cause of an error that happened in another process, which reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FailedElsewhere {
    /// The rank where it happened.
    pub rank: usize,
}

impl fmt::Display for FailedElsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it happened in the process of rank {}", self.rank)
    }
}

impl std::error::Error for FailedElsewhere {}

/// The error of a process whose part is done, where rank 0 has failed and says why.
pub fn reported_by_first(what: &str) -> Error {
    elsewhere(Failure { rank: 0, message: what.into() }, joined().map_or(1, |job| job.ranks()))
}

/// The error of a process that was stopped by another.
pub(crate) fn elsewhere(Failure { rank, message }: Failure, ranks: usize) -> Error {
    let place = format!("on rank {rank} of {ranks}");
    let problem = Problem::new(message.to_string()).because(place);
    Error::failed(problem.caused_by(FailedElsewhere { rank }))
}

/// Tells the other processes how this one ends, and says whether it should report its error: an
/// error of the job is reported once, by the process where it happened. Nothing is to be reported
/// if all went well.
pub fn end(error: Option<&Error>) -> bool {
    let Some(error) = error else {
        if let Some(job) = joined() {
            job.end("");
        }
        return false;
    };
    let told = error.cause::<FailedElsewhere>();
    let Some(job) = joined() else {
        // Ranks that could not meet: the one that found out reports it.
        return told.is_none();
    };
    let report = match (told, job.rank()) {
        // If that process has died without a word, this one reports it, unless a launcher does.
        (Some(FailedElsewhere { rank }), 0) => {
            let words = job.ended(*rank, LAST_WORDS);
            words.is_none() && !job.environment().launched
        }
        (Some(_), _) => false,
        // What fails because a process died is no error of its own: the launcher names that process.
        (None, _) => !(job.environment().launched && job.lost_one(SUDDEN_END)),
    };
    let text = if report { error.to_string() } else { String::new() };
    job.end(&text);
    if let Some(mpi) = job.mpi() {
        end_mpi_soon(mpi.clone());
    }
    // What rank 0 has reported, such as a bad configuration, is not reported again.
    report && (job.rank() == 0 || job.ended(0, LAST_WORDS).is_none_or(|words| words.is_empty()))
}

/// Ends the MPI job if its processes do not leave it together: one of them may wait without end.
fn end_mpi_soon(mpi: Arc<Mpi>) {
    let wait = move || {
        std::thread::sleep(LEAVING);
        mpi.abort(1);
    };
    // Without a thread, mpirun ends the others when this process has ended.
    let _ = std::thread::Builder::new().spawn(wait);
}
