//! The meeting of a job's processes, and what they tell each other outside of any world.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_sys::Poll;

use super::environment::{Environment, MeetingPoint};
use super::hello::{Hello, Token};
use super::line::{Line, Note};
use super::meeting::{Guest, Host};
use super::socket::Address;
use super::world::Door;
use crate::error::{CommError, Failure};
use crate::mpi::Mpi;
use crate::streams::Stream;

/// What a process knows of its job, once all its processes have met.
pub struct Membership {
    pub(super) me: Environment,
    pub(super) hello: Hello,
    pub(super) reach: Reach,
    /// By rank: on rank 0 the lines to all others, elsewhere the one to rank 0.
    pub(super) lines: Mutex<Vec<Option<Line>>>,
    pub(super) wait: Duration,
}

/// How processes reach each other.
pub(super) enum Reach {
    /// Each has a door, at an address that all know, by rank.
    Sockets { door: Mutex<Door>, addresses: Vec<Address> },
    /// Through an MPI library.
    Mpi(Arc<Mpi>),
}

impl Membership {
    /// Meets the other processes; waits at most this long for them.
    pub fn meet(me: &Environment, wait: Duration) -> Result<Self, CommError> {
        Self::come_together(me, wait, None, &|_| {})
    }

    /// The same; if it takes more than a few seconds, `tell` gets a sentence on what is waited for.
    pub fn meet_telling(
        me: &Environment,
        wait: Duration,
        tell: &dyn Fn(&str),
    ) -> Result<Self, CommError> {
        Self::come_together(me, wait, None, tell)
    }

    /// Meets the other processes of an MPI job.
    pub fn meet_over(mpi: &Arc<Mpi>, wait: Duration) -> Result<Self, CommError> {
        let (rank, ranks, token) = (mpi.rank(), mpi.ranks(), Token::of("mpi"));
        let (local, meet) = (None, MeetingPoint::Mpi);
        // mpirun tells people about lost processes.
        let me = Environment { rank, ranks, local, meet, token, launched: true, epoch: 0 };
        Self::come_together(&me, wait, Some(mpi), &|_| {})
    }

    fn come_together(
        me: &Environment,
        wait: Duration,
        mpi: Option<&Arc<Mpi>>,
        tell: &dyn Fn(&str),
    ) -> Result<Self, CommError> {
        let hello = Hello { epoch: me.epoch, ..Hello::new(me.token, me.rank, me.ranks) };
        let start = Instant::now();
        match me.rank {
            0 => Host { me, hello, wait, start, mpi, tell }.gather(),
            _ => Guest { me, hello, wait, start, mpi, tell }.come(),
        }
    }

    /// The MPI job that this one is.
    pub fn mpi(&self) -> Option<&Arc<Mpi>> {
        match &self.reach {
            Reach::Mpi(mpi) => Some(mpi),
            Reach::Sockets { .. } => None,
        }
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.me.rank
    }

    /// How many ranks there are, each a process.
    pub fn ranks(&self) -> usize {
        self.me.ranks
    }

    /// How long this process waits for another.
    pub fn wait(&self) -> Duration {
        self.wait
    }

    /// Who this process is.
    pub fn environment(&self) -> &Environment {
        &self.me
    }

    /// What rank 0 gives, on every rank; other ranks give nothing. All must call it together.
    pub fn from_first(&self, given: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let start = Instant::now();
        if self.me.rank == 0 {
            let mut lines = self.lines();
            lines.iter_mut().flatten().for_each(|line| line.send(&Note::Given(given.clone())));
            return Ok(given);
        }
        loop {
            self.check_lines()?;
            if let Some(line) = &mut self.lines()[0]
                && let Some(given) = line.given.pop_front()
            {
                return Ok(given);
            }
            if start.elapsed() >= self.wait {
                let (me, waited) = (self.me.rank, self.wait.as_secs_f64());
                return Err(meeting_error(
                    format!("rank {me} waited {waited:.1} s for what rank 0 measures"),
                    "raise run.timeout_s if rank 0 needs longer",
                ));
            }
            self.rest(&mut Poll::default());
        }
    }

    /// Tells the other processes that this one ends, and with which error; none if it is empty.
    pub fn end(&self, error: &str) {
        let note = Note::Ended(error.to_owned());
        self.lines().iter_mut().flatten().for_each(|line| line.send(&note));
    }

    /// The error that a process ended with, or nothing if it has not said so within this time; an
    /// empty one if it just ended. Only rank 0 hears all; the others hear rank 0.
    pub fn ended(&self, rank: usize, patience: Duration) -> Option<String> {
        let start = Instant::now();
        loop {
            {
                let mut lines = self.lines();
                let line = lines.get_mut(rank)?.as_mut()?;
                line.listen();
                if let Some(text) = &line.ended {
                    return Some(text.clone());
                }
                if line.closed || start.elapsed() >= patience {
                    return None;
                }
            }
            self.rest(&mut Poll::default());
        }
    }

    /// Whether a process that this one hears has ended without a word, or does so within this time.
    pub fn lost_one(&self, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            for line in self.lines().iter_mut().flatten() {
                line.listen();
                if line.closed && line.ended.is_none() {
                    return true;
                }
            }
            if start.elapsed() >= patience {
                return false;
            }
            self.rest(&mut Poll::default());
        }
    }

    /// Fails if a process that this one hears has ended.
    pub(super) fn check_lines(&self) -> Result<(), CommError> {
        for (rank, line) in self.lines().iter_mut().enumerate() {
            let Some(line) = line else { continue };
            line.listen();
            let message = match &line.ended {
                Some(text) if text.is_empty() => "its process has ended".into(),
                Some(text) => text.as_str().into(),
                None if line.closed => "its process has ended without a word".into(),
                None => continue,
            };
            return Err(CommError::Aborted(Failure { rank, message }));
        }
        Ok(())
    }

    /// Sleeps until a line, or one of what is added already, can be read.
    pub(super) fn rest(&self, poll: &mut Poll) {
        for line in self.lines().iter().flatten().filter(|line| !line.closed) {
            line.socket.watch(poll, false);
        }
        poll.wait(Duration::from_millis(50));
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Option<Line>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn meeting_error(problem: impl Into<String>, fix: impl Into<String>) -> CommError {
    CommError::Meeting { problem: problem.into(), fix: fix.into() }
}
