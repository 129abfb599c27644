//! The suite that every transport must pass: over threads that spin, threads that sleep, threads
//! that see only shared memory of each other, and ranks that share no memory.

use phalanx_comm::{Failure, Launcher, Options, Streams, Threads, Waiting, run_ranks};

use super::attached::Attached;
use super::suite::{self, Settings, Transport, Work};

/// A transport by its launcher.
pub(crate) struct Launched<F>(pub(crate) F);

impl<L: Launcher, F: Fn(usize, Options) -> L> Transport for Launched<F> {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        let Settings { timeout, planted_copy } = settings;
        let options = Options { timeout, planted_copy, ..Options::default() };
        run_ranks(&(self.0)(ranks, options), work).map(drop)
    }
}

fn threads(waiting: Waiting) -> impl Transport {
    Launched(move |ranks, options| Threads { ranks, options: Options { waiting, ..options } })
}

#[test]
fn spinning_threads_conform() {
    suite::run(&mut threads(Waiting::Spin)).unwrap();
}

#[test]
fn sleeping_threads_conform() {
    suite::run(&mut threads(Waiting::Park)).unwrap();
}

#[test]
fn views_of_shared_memory_conform() {
    for waiting in [Waiting::Spin, Waiting::Park] {
        let launcher = |ranks, options| Attached { ranks, options: Options { waiting, ..options } };
        suite::run(&mut Launched(launcher)).unwrap();
    }
}

#[test]
fn streams_conform() {
    suite::run(&mut Launched(|ranks, options| Streams { ranks, options })).unwrap();
}
