//! The core property on ranks that are threads: random programs on random meshes with random
//! annotations, with their gradients, partitioned by the partitioner and at random, as emitted and
//! after the passes that scripts run, equal the reference interpreter.

use phalanx_comm::Communicator;
use phalanx_cpu::CpuEngine;
use phalanx_testing::Seeds;
use phalanx_testing::cases::{Chooser, try_seeds};
use phalanx_testing::checks::on_threads;
use phalanx_testing::threads::Ranks;

/// How many cases each chooser is tried with, on ranks of one thread or of two.
const CASES: usize = 2000;

fn check(chooser: Chooser) {
    let seeds = Seeds::for_cases(CASES);
    println!("seeds {:?}, chosen by {chooser:?}", seeds.range);
    let ranks = |threads| {
        Ranks::new(move |endpoint: Box<dyn Communicator>| {
            CpuEngine::on_rank(threads, endpoint).unwrap()
        })
    };
    let mut crews = [ranks(1), ranks(2)];
    let found = try_seeds(seeds.range, chooser, |trial| {
        let crew = &mut crews[trial.seed as usize % 2];
        on_threads(&trial.whole, &trial.parts, trial.seed, crew)
    });
    let tally = found.unwrap_or_else(|found| panic!("{found}"));
    println!("{} cases, with {:?}", tally.ran, tally.with);
    assert!(tally.ran >= seeds.at_least, "{} of {} ran: {tally:#?}", tally.ran, seeds.at_least);
}

#[test]
fn random_choices_run_on_ranks() {
    check(Chooser::Random);
}

#[test]
fn the_partitioners_choices_run_on_ranks() {
    check(Chooser::Partitioner);
}
