//! The worker pool of this process: one thread per local rank, with a state that it keeps.
//!
//! The ranks of a training run live as long as the run. Each creates its state on its own thread
//! (an engine with its memory and its endpoint), and every job gets that state. A rank that fails
//! stops the others, and the first failure is reported, with its own error. The launcher decides
//! which ranks of the world are in this process.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::communicator::{Communicator, Stop};
use crate::error::{CommError, Failure};
use crate::exchange;
use crate::launch::{Launcher, LocalRank};
use crate::workers::Workers;

/// Runs `work` once on every local rank of a new world; gives what they return, by local rank, or
/// the first failure.
pub fn run_ranks<T, E, F>(launcher: &dyn Launcher, work: F) -> Result<Vec<T>, Failure>
where
    T: Send,
    E: Display + Send,
    F: Fn(&mut dyn Communicator) -> Result<T, E> + Sync,
{
    let rank_pool = RankPool::new(launcher, Ok::<_, CommError>);
    let mut rank_pool = rank_pool.map_err(|lost: PoolFailure<CommError>| lost.failure)?;
    let done = rank_pool.run(|_, endpoint: &mut Box<dyn Communicator>| work(endpoint.as_mut()));
    done.map_err(|lost| lost.failure)
}

/// The first failure of a worker pool: the rank and a message, and the error that its work
/// returned, unless it panicked, ended or is not a rank of this process.
#[derive(Debug)]
pub struct PoolFailure<E> {
    /// The rank and its message.
    pub failure: Failure,
    /// What its work returned.
    pub error: Option<E>,
    /// Whether the system refused to start the ranks, so that none has done anything.
    pub refused: bool,
}

impl<E> From<Failure> for PoolFailure<E> {
    fn from(failure: Failure) -> Self {
        Self { failure, error: None, refused: false }
    }
}

/// Threads that are the local ranks of one world, each with a state.
pub struct RankPool<S> {
    /// Dropped before the threads that made them.
    states: Vec<Option<S>>,
    /// The line to the processes of the other ranks, if there are any.
    beside: Option<Box<dyn Communicator>>,
    locals: Locals,
    world: usize,
}

/// What a worker pool knows of its ranks besides their states.
struct Locals {
    ranks: Vec<usize>,
    stops: Vec<Arc<dyn Stop>>,
    workers: Workers,
}

impl<S: Send> RankPool<S> {
    /// Starts a thread for each local rank; `make` creates its state there, from its endpoint.
    pub fn new<E, F>(launcher: &dyn Launcher, make: F) -> Result<Self, PoolFailure<E>>
    where
        E: Display + Send,
        F: Fn(Box<dyn Communicator>) -> Result<S, E> + Sync,
    {
        // No rank runs yet, so the failure is attributed to the first.
        let failed = |error: CommError| match error {
            CommError::Aborted(failure) => PoolFailure::from(failure),
            error => {
                let failure = Failure { rank: 0, message: error.to_string().into() };
                PoolFailure { failure, error: None, refused: true }
            }
        };
        let launched = launcher.launch().map_err(failed)?;
        let beside = launcher.beside().map_err(failed)?;
        let ranks: Vec<usize> = launched.iter().map(|local| local.endpoint.rank()).collect();
        let stops = launched.iter().map(|local| local.endpoint.stopper()).collect();
        let workers = Workers::new(&ranks).map_err(failed)?;
        let locals = Locals { ranks, stops, workers };
        let mut given: Vec<Option<LocalRank>> = launched.into_iter().map(Some).collect();
        let made = locals.run(&mut given, |_, given| {
            let Some(LocalRank { endpoint, cores }) = given.take() else { return Ok(None) };
            // Threads that the state starts are bound with it. If the system refuses, the rank is
            // not bound.
            phalanx_sys::bind_thread(&cores);
            make(endpoint).map(Some)
        });
        let mut pool = Self { states: Vec::new(), beside, locals, world: launcher.ranks() };
        pool.states = made.map_err(|lost: PoolFailure<E>| pool.told(lost))?;
        Ok(pool)
    }

    /// How many ranks the world has.
    pub fn ranks(&self) -> usize {
        self.world
    }

    /// The ranks of this process, the lowest first.
    pub fn local(&self) -> &[usize] {
        &self.locals.ranks
    }

    /// Runs `work` on every local rank with its number in the world and its state; gives what they
    /// return, by local rank, or the first failure. After a failure every communication fails.
    pub fn run<T, E, F>(&mut self, work: F) -> Result<Vec<T>, PoolFailure<E>>
    where
        T: Send,
        E: Display + Send,
        F: Fn(usize, &mut S) -> Result<T, E> + Sync,
    {
        let mut states: Vec<&mut S> = self.states.iter_mut().flatten().collect();
        let done = self.locals.run(&mut states, |rank, state| work(rank, state));
        done.map_err(|lost| self.told(lost))
    }

    /// What the processes of all ranks give, by rank; nothing if all ranks are in this process. Every
    /// process must call it together, and has one rank.
    pub fn exchange<E>(&mut self, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>, PoolFailure<E>> {
        let Some(beside) = &mut self.beside else { return Ok(None) };
        exchange::gather(beside.as_mut(), own).map(Some).map_err(|error| {
            let rank = beside.rank();
            let failure = match error {
                CommError::Aborted(failure) => failure,
                error => Failure { rank, message: error.to_string().into() },
            };
            // Here no rank is in a call, but elsewhere one may be.
            self.locals.stops.iter().for_each(|stop| drop(stop.stop(&failure.message)));
            failure.into()
        })
    }

    /// Tells the other processes of a failure of this one, if they wait beside the ranks' world.
    fn told<E>(&mut self, lost: PoolFailure<E>) -> PoolFailure<E> {
        if let Some(beside) = &mut self.beside
            && self.locals.ranks.contains(&lost.failure.rank)
        {
            beside.abort(&lost.failure.message);
        }
        lost
    }
}

impl Locals {
    /// Runs a job on each thread, with its own argument.
    fn run<G, T, E, F>(&self, given: &mut [G], work: F) -> Result<Vec<T>, PoolFailure<E>>
    where
        G: Send,
        T: Send,
        E: Display + Send,
        F: Fn(usize, &mut G) -> Result<T, E> + Sync,
    {
        let mut results: Vec<Option<Result<T, PoolFailure<E>>>> =
            given.iter().map(|_| None).collect();
        let mut jobs: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::with_capacity(given.len());
        let own = self.ranks.iter().zip(&self.stops);
        for ((given, result), (&rank, stop)) in given.iter_mut().zip(&mut results).zip(own) {
            let work = &work;
            jobs.push(Box::new(move || {
                *result = Some(guarded(rank, stop.as_ref(), || work(rank, given)));
            }));
        }
        self.workers.run(jobs);
        let mut done = Vec::with_capacity(results.len());
        let mut lost: Option<PoolFailure<E>> = None;
        for (result, &rank) in results.into_iter().zip(&self.ranks) {
            let ended = || Err(Failure { rank, message: "its thread ended".into() }.into());
            match result.unwrap_or_else(ended) {
                Ok(value) => done.push(value),
                // All ranks report the same failure; the rank where it happened has the error.
                Err(own) if lost.as_ref().is_none_or(|l| l.error.is_none()) => lost = Some(own),
                Err(_) => {}
            }
        }
        match lost {
            None => Ok(done),
            Some(lost) => Err(lost),
        }
    }
}

/// Runs a rank's job; an error or a panic stops the others.
fn guarded<T, E: Display>(
    rank: usize,
    stop: &dyn Stop,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, PoolFailure<E>> {
    let (message, error) = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => (error.to_string(), Some(error)),
        Err(panic) => (format!("panicked: {}", text(&*panic)), None),
    };
    let failure = stop.stop(&message);
    let error = error.filter(|_| failure.rank == rank);
    Err(PoolFailure { failure, error, refused: false })
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::Collectives;
    use crate::call::ReduceOp;
    use crate::group::{Group, GroupId};
    use crate::threads::{Options, Threads};

    struct State {
        endpoint: Box<dyn Communicator>,
        all: GroupId,
        runs: usize,
    }

    fn make(mut endpoint: Box<dyn Communicator>) -> Result<State, CommError> {
        let all = endpoint.group(&Group::world(endpoint.world()))?;
        Ok(State { endpoint, all, runs: 0 })
    }

    #[test]
    fn states_stay_on_their_ranks_between_runs() {
        let mut rank_pool = RankPool::new(&Threads::new(3), make).unwrap();
        for run in 1..4 {
            let sums = rank_pool.run(|rank, state: &mut State| {
                state.runs += 1;
                let mut values = [rank as f64, state.runs as f64];
                state.endpoint.all_reduce(state.all, ReduceOp::Sum, &mut values)?;
                Ok::<_, CommError>(values)
            });
            assert_eq!(sums.unwrap(), vec![[3.0, 3.0 * run as f64]; 3]);
        }
    }

    #[test]
    fn ranks_are_bound_to_cores_of_their_own_if_there_are_enough() {
        let cores = phalanx_sys::allowed_cores();
        for ranks in [1, cores.len(), cores.len() + 1] {
            let options = Options { bind: true, ..Options::default() };
            let on = |_: Box<dyn Communicator>| Ok::<_, CommError>(phalanx_sys::allowed_cores());
            let mut rank_pool = RankPool::new(&Threads { ranks, options }, on).unwrap();
            let found = rank_pool.run(|_, cores| Ok::<_, CommError>(cores.clone())).unwrap();
            if ranks > cores.len() {
                assert_eq!(found, vec![cores.clone(); ranks]);
                continue;
            }
            // Which one is the machine's business: physical cores come first.
            assert!(found.iter().all(|own| own.len() == 1 && cores.contains(&own[0])), "{found:?}");
            let distinct: BTreeSet<usize> = found.iter().flatten().copied().collect();
            assert_eq!(distinct.len(), ranks, "{found:?}");
        }
    }

    #[test]
    fn one_failure_stops_all_and_is_told() {
        let mut rank_pool = RankPool::new(&Threads::new(3), make).unwrap();
        for expected in ["rank 1 failed: panicked: no luck", "rank 1 failed: panicked: no luck"] {
            let failure = rank_pool.run(|rank, state: &mut State| {
                assert!(rank != 1, "no luck");
                let mut values = [1.0];
                state.endpoint.all_reduce(state.all, ReduceOp::Sum, &mut values)
            });
            assert_eq!(failure.unwrap_err().failure.to_string(), expected);
        }
    }

    #[test]
    fn a_state_that_cannot_be_made_is_told() {
        let made =
            RankPool::new(&Threads::new(2), |endpoint: Box<dyn Communicator>| {
                match endpoint.rank() {
                    1 => Err("no memory"),
                    _ => Ok(()),
                }
            });
        let Err(lost) = made else { panic!("it was made") };
        assert_eq!(lost.failure.to_string(), "rank 1 failed: no memory");
        assert_eq!(lost.error, Some("no memory"));
    }

    /// A process that holds only some ranks of the world, as processes on several hosts will.
    struct Upper;

    impl Launcher for Upper {
        fn ranks(&self) -> usize {
            3
        }

        fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
            Ok(Threads::new(3).launch()?.into_iter().skip(1).collect())
        }
    }

    #[test]
    fn a_rank_pool_may_hold_some_of_the_ranks() {
        let mut rank_pool =
            RankPool::new(&Upper, |endpoint| Ok::<_, CommError>(endpoint.rank())).unwrap();
        assert_eq!((rank_pool.ranks(), rank_pool.local()), (3, &[1, 2][..]));
        let found = rank_pool.run(|rank, state| Ok::<_, CommError>((rank, *state)));
        assert_eq!(found.unwrap(), [(1, 1), (2, 2)]);
        let lost = rank_pool.run(|rank, _| if rank == 2 { Err("no luck") } else { Ok(()) });
        let lost = lost.unwrap_err();
        assert_eq!((lost.failure.rank, lost.error), (2, Some("no luck")));
    }
}
