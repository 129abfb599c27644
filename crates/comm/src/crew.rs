//! Ranks that keep something between runs: every thread has a state of its own, made once.
//!
//! A trainer's ranks live as long as the training. Each makes its state on its own thread (an
//! engine with its memory and its endpoint), and every run gives the state to a piece of work. A
//! rank that fails stops the others, and its failure is the one that is told, with its own error.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{CommError, Failure};
use crate::launch::{Team, text};
use crate::threads::{Endpoint, Options, Stopper, World};

/// The first failure of a crew: which rank, in words, and the error that its work returned, unless
/// it panicked or was lost.
#[derive(Debug)]
pub struct Lost<E> {
    /// The rank and its message.
    pub failure: Failure,
    /// What its work returned.
    pub error: Option<E>,
}

impl<E> Lost<E> {
    fn at(rank: usize, message: impl Into<std::sync::Arc<str>>) -> Self {
        Self { failure: Failure { rank, message: message.into() }, error: None }
    }
}

/// Threads that are ranks of one world, each with a state.
pub struct Crew<S> {
    /// Dropped before the threads that made them.
    states: Vec<Option<S>>,
    stopper: Stopper,
    team: Team,
}

impl<S: Send> Crew<S> {
    /// Starts `ranks` threads; `make` makes each one's state from its endpoint.
    pub fn new<E, F>(ranks: usize, options: &Options, make: F) -> Result<Self, Lost<E>>
    where
        E: Display + Send,
        F: Fn(Endpoint) -> Result<S, E> + Sync,
    {
        let failed = |error: CommError| Lost::at(0, error.to_string());
        let team = Team::new(ranks).map_err(failed)?;
        let world = World::new(ranks, options.clone());
        let stopper = world.stopper();
        let mut endpoints: Vec<Option<Endpoint>> =
            world.into_endpoints().into_iter().map(Some).collect();
        let states: Vec<Option<S>> = endpoints.iter().map(|_| None).collect();
        let mut crew = Self { states, stopper, team };
        let mut given: Vec<_> = crew.states.iter_mut().zip(&mut endpoints).collect();
        run_on(&mut crew.team, &crew.stopper, &mut given, |_, (state, endpoint)| {
            let Some(endpoint) = endpoint.take() else { return Ok(()) };
            make(endpoint).map(|made| **state = Some(made))
        })?;
        Ok(crew)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.states.len()
    }

    /// Runs `work` on every rank with its state; gives what they return, by rank, or the first
    /// failure. After a failure every communication fails.
    pub fn run<T, E, F>(&mut self, work: F) -> Result<Vec<T>, Lost<E>>
    where
        T: Send,
        E: Display + Send,
        F: Fn(usize, &mut S) -> Result<T, E> + Sync,
    {
        let mut states: Vec<&mut S> = self.states.iter_mut().flatten().collect();
        run_on(&mut self.team, &self.stopper, &mut states, |rank, state| work(rank, state))
    }

    /// One rank's state, from outside; its thread is idle then.
    pub fn state(&mut self, rank: usize) -> Option<&mut S> {
        self.states.get_mut(rank)?.as_mut()
    }
}

/// Runs a piece of work on each thread, with something of its own.
fn run_on<G, T, E, F>(
    team: &mut Team,
    stopper: &Stopper,
    given: &mut [G],
    work: F,
) -> Result<Vec<T>, Lost<E>>
where
    G: Send,
    T: Send,
    E: Display + Send,
    F: Fn(usize, &mut G) -> Result<T, E> + Sync,
{
    let mut results: Vec<Option<Result<T, Lost<E>>>> = given.iter().map(|_| None).collect();
    let mut jobs: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::with_capacity(given.len());
    for (rank, (given, result)) in given.iter_mut().zip(&mut results).enumerate() {
        let work = &work;
        jobs.push(Box::new(move || *result = Some(guarded(rank, stopper, || work(rank, given)))));
    }
    team.run_jobs(jobs);
    let mut done = Vec::with_capacity(results.len());
    let mut lost: Option<Lost<E>> = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result.unwrap_or_else(|| Err(Lost::at(rank, "its thread ended"))) {
            Ok(value) => done.push(value),
            // All ranks tell the same failure; the rank where it happened has the error.
            Err(own) if lost.as_ref().is_none_or(|l| l.error.is_none()) => lost = Some(own),
            Err(_) => {}
        }
    }
    match lost {
        None => Ok(done),
        Some(lost) => Err(lost),
    }
}

/// Does a rank's work; whatever goes wrong stops the others.
fn guarded<T, E: Display>(
    rank: usize,
    stopper: &Stopper,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, Lost<E>> {
    let (message, error) = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => (error.to_string(), Some(error)),
        Err(panic) => (format!("panicked: {}", text(&*panic)), None),
    };
    let failure = stopper.stop(rank, message);
    let error = error.filter(|_| failure.rank == rank);
    Err(Lost { failure, error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Collectives;
    use crate::call::Reduction;
    use crate::communicator::Communicator;
    use crate::group::{Group, GroupId};

    struct State {
        endpoint: Endpoint,
        all: GroupId,
        runs: usize,
    }

    fn make(mut endpoint: Endpoint) -> Result<State, CommError> {
        let all = endpoint.group(&Group::world(endpoint.world()))?;
        Ok(State { endpoint, all, runs: 0 })
    }

    #[test]
    fn states_stay_on_their_ranks_between_runs() {
        let mut crew = Crew::new(3, &Options::default(), make).unwrap();
        for run in 1..4 {
            let sums = crew.run(|rank, state: &mut State| {
                state.runs += 1;
                let mut values = [rank as f64, state.runs as f64];
                state.endpoint.all_reduce(state.all, Reduction::Sum, &mut values)?;
                Ok::<_, CommError>(values)
            });
            assert_eq!(sums.unwrap(), vec![[3.0, 3.0 * run as f64]; 3]);
        }
    }

    #[test]
    fn one_failure_stops_all_and_is_told() {
        let mut crew = Crew::new(3, &Options::default(), make).unwrap();
        for expected in ["rank 1 failed: panicked: no luck", "rank 1 failed: panicked: no luck"] {
            let failure = crew.run(|rank, state: &mut State| {
                assert!(rank != 1, "no luck");
                let mut values = [1.0];
                state.endpoint.all_reduce(state.all, Reduction::Sum, &mut values)
            });
            assert_eq!(failure.unwrap_err().failure.to_string(), expected);
        }
    }

    #[test]
    fn a_state_that_cannot_be_made_is_told() {
        let made = Crew::new(2, &Options::default(), |endpoint: Endpoint| match endpoint.rank() {
            1 => Err("no memory"),
            _ => Ok(()),
        });
        let Err(lost) = made else { panic!("it was made") };
        assert_eq!(lost.failure.to_string(), "rank 1 failed: no memory");
        assert_eq!(lost.error, Some("no memory"));
    }
}
