//! The suite that every transport must pass, over threads that spin and threads that sleep.

use phalanx_comm::conformance::{self, Settings, Transport, Work};
use phalanx_comm::{Failure, Options, Team, Waiting};

/// Threads, kept from case to case.
struct Threads {
    waiting: Waiting,
    teams: Vec<Option<Team>>,
}

impl Transport for Threads {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        let options = Options {
            timeout: settings.timeout,
            planted_copy: settings.planted_copy,
            waiting: self.waiting,
            ..Options::default()
        };
        self.teams.resize_with(self.teams.len().max(ranks + 1), || None);
        let team = self.teams[ranks].get_or_insert_with(|| Team::new(ranks).unwrap());
        team.run(&options, |endpoint| work(endpoint)).map(drop)
    }
}

#[test]
fn spinning_threads_conform() {
    conformance::run(&mut Threads { waiting: Waiting::Spin, teams: Vec::new() }).unwrap();
}

#[test]
fn sleeping_threads_conform() {
    conformance::run(&mut Threads { waiting: Waiting::Park, teams: Vec::new() }).unwrap();
}
