//! Threads that are ranks: started together, and stopped together when one of them fails.
//!
//! The first failure is the one that is told: the panic or error of the rank where it happened,
//! with that rank's number. What the others say because of it is not.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::communicator::Communicator;
use crate::error::{CommError, Failure};
use crate::threads::{Endpoint, Options, World};

/// Runs `work` once on each of `ranks` new threads; gives what they return, by rank, or the first
/// failure.
pub fn run_ranks<T, E, F>(ranks: usize, options: &Options, work: F) -> Result<Vec<T>, Failure>
where
    T: Send,
    E: Display + Send,
    F: Fn(&mut Endpoint) -> Result<T, E> + Sync,
{
    let mut team =
        Team::new(ranks).map_err(|error| Failure { rank: 0, message: error.to_string().into() })?;
    team.run(options, work)
}

/// Rank threads that outlive what they run, for many short runs.
pub struct Team {
    workers: Vec<Worker>,
    /// The cores that the threads may run on when they are not bound.
    cores: Vec<usize>,
}

struct Worker {
    jobs: Option<Sender<Job>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

/// What a thread runs next. It borrows from the caller of [`Team::run`], which waits for its end.
type Job = Box<dyn FnOnce() + Send + 'static>;

impl Team {
    /// As many threads as ranks, at least one.
    pub fn new(ranks: usize) -> Result<Self, CommError> {
        let workers = (0..ranks.max(1)).map(Worker::new).collect::<Result<_, _>>()?;
        Ok(Self { workers, cores: phalanx_sys::allowed_cores() })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.workers.len()
    }

    /// Runs `work` once on every rank, in a world of their own; gives what they return, by rank,
    /// or the first failure.
    pub fn run<T, E, F>(&mut self, options: &Options, work: F) -> Result<Vec<T>, Failure>
    where
        T: Send,
        E: Display + Send,
        F: Fn(&mut Endpoint) -> Result<T, E> + Sync,
    {
        let endpoints = World::new(self.ranks(), options.clone()).into_endpoints();
        let mut results: Vec<Result<T, Failure>> = Vec::with_capacity(endpoints.len());
        let untold = || Err(Failure { rank: 0, message: "its thread ended".into() });
        results.resize_with(endpoints.len(), untold);
        let mut jobs: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::with_capacity(endpoints.len());
        for (mut endpoint, result) in endpoints.into_iter().zip(&mut results) {
            let (work, cores) = (&work, self.cores_of(endpoint.rank(), options));
            jobs.push(Box::new(move || {
                // Where the system refuses, the rank runs wherever the system likes.
                phalanx_sys::bind_thread(cores);
                *result = guarded(&mut endpoint, work);
            }));
        }
        self.run_jobs(jobs);
        // All ranks tell the same failure, because the world keeps the first.
        results.into_iter().collect()
    }

    /// The cores for a rank's threads: its own, if it is to be bound and there are enough.
    pub(crate) fn cores_of(&self, rank: usize, options: &Options) -> &[usize] {
        let threads = options.threads_per_rank.max(1);
        match self.cores.get(rank * threads..(rank + 1) * threads) {
            Some(own) if options.bind && self.ranks() * threads <= self.cores.len() => own,
            _ => &self.cores,
        }
    }

    /// Runs one job on each thread, and returns when all have ended.
    pub(crate) fn run_jobs(&self, jobs: Vec<Box<dyn FnOnce() + Send + '_>>) {
        for (worker, job) in self.workers.iter().zip(jobs) {
            // SAFETY: only the lifetime is changed. The job is dropped by the thread before it
            // says that it is done, or by `send` if the thread has ended; this function returns
            // after that, so what the job borrows outlives it.
            let job: Job = unsafe { std::mem::transmute(job) };
            if let Some(jobs) = &worker.jobs {
                drop(jobs.send(job));
            }
        }
        for worker in &self.workers {
            // An error says that the thread has ended, and with it the job.
            let _ = worker.done.recv();
        }
    }
}

impl Worker {
    fn new(rank: usize) -> Result<Self, CommError> {
        let (jobs, next) = channel::<Job>();
        let (tell, done) = channel();
        let body = move || {
            for job in next {
                // The job catches panics by itself; this is for those of its own drop.
                drop(catch_unwind(AssertUnwindSafe(job)));
                if tell.send(()).is_err() {
                    return;
                }
            }
        };
        let builder = std::thread::Builder::new().name(format!("rank {rank}"));
        let thread = builder.spawn(body).map_err(|error| CommError::System {
            what: format!("starting the thread of rank {rank}"),
            error: error.to_string(),
        })?;
        Ok(Self { jobs: Some(jobs), done, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Runs a rank's work; whatever goes wrong stops the others.
fn guarded<T, E: Display>(
    endpoint: &mut Endpoint,
    work: impl Fn(&mut Endpoint) -> Result<T, E>,
) -> Result<T, Failure> {
    let message = match catch_unwind(AssertUnwindSafe(|| work(endpoint))) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("panicked: {}", text(&*panic)),
    };
    endpoint.abort(&message);
    let rank = endpoint.rank();
    Err(endpoint.failure().unwrap_or(Failure { rank, message: message.into() }))
}

pub(crate) fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without words")
}
