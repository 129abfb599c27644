//! The suite that every transport must pass, over threads that spin and threads that sleep.

use phalanx_comm::conformance::{self, Settings, Transport, Work};
use phalanx_comm::{Failure, Options, Threads, Waiting, run_ranks};

struct OnThreads {
    waiting: Waiting,
}

impl Transport for OnThreads {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        let options = Options {
            timeout: settings.timeout,
            planted_copy: settings.planted_copy,
            waiting: self.waiting,
            ..Options::default()
        };
        run_ranks(&Threads { ranks, options }, work).map(drop)
    }
}

#[test]
fn spinning_threads_conform() {
    conformance::run(&mut OnThreads { waiting: Waiting::Spin }).unwrap();
}

#[test]
fn sleeping_threads_conform() {
    conformance::run(&mut OnThreads { waiting: Waiting::Park }).unwrap();
}
