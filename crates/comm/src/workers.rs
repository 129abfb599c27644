//! Threads that wait for jobs: one for each rank of this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::error::CommError;

/// One long-lived thread for each local rank.
pub(crate) struct Workers {
    list: Vec<Worker>,
}

impl Workers {
    /// Starts a thread for each of these ranks.
    pub(crate) fn new(ranks: &[usize]) -> Result<Self, CommError> {
        let list = ranks.iter().map(|&rank| Worker::new(rank)).collect::<Result<_, _>>()?;
        Ok(Self { list })
    }

    /// Runs one job on each thread, and returns when all have ended.
    pub(crate) fn run(&self, jobs: Vec<Box<dyn FnOnce() + Send + '_>>) {
        for (worker, job) in self.list.iter().zip(jobs) {
            // SAFETY: only the lifetime is changed. The job is dropped by the thread before it
            // says that it is done, or by `send` if the thread has ended; this function returns
            // after that, so what the job borrows outlives it.
            let job: Job = unsafe { std::mem::transmute(job) };
            if let Some(jobs) = &worker.jobs {
                drop(jobs.send(job));
            }
        }
        for worker in &self.list {
            // An error means that the thread has ended, and with it the job.
            let _ = worker.done.recv();
        }
    }
}

/// What a thread runs next. It borrows from the caller of [`Workers::run`], which waits for its end.
type Job = Box<dyn FnOnce() + Send + 'static>;

struct Worker {
    jobs: Option<Sender<Job>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn new(rank: usize) -> Result<Self, CommError> {
        let (jobs, next) = channel::<Job>();
        let (tell, done) = channel();
        let body = move || {
            for job in next {
                // The job itself catches panics; this catches panics in its drop.
                drop(catch_unwind(AssertUnwindSafe(job)));
                if tell.send(()).is_err() {
                    return;
                }
            }
        };
        let builder = std::thread::Builder::new().name(format!("rank {rank}"));
        let thread = builder.spawn(body).map_err(|error| CommError::System {
            what: format!("the system refuses a thread for rank {rank}"),
            error: format!("{error}; use fewer ranks, or allow more (ulimit -u, ulimit -v)"),
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
