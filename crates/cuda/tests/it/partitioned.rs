//! Random programs on random meshes with random annotations equal the reference interpreter.

use phalanx_comm::Communicator;
use phalanx_cuda::CudaEngine;
use phalanx_testing::Seeds;
use phalanx_testing::cases::{Chooser, try_seeds};
use phalanx_testing::checks::on_threads;
use phalanx_testing::threads::Ranks;

use crate::gpu;

fn check(chooser: Chooser, cases: usize) {
    let seeds = Seeds::for_cases(cases);
    let engine = |endpoint: Box<dyn Communicator>| CudaEngine::on_rank(endpoint).unwrap();
    let mut ranks = Ranks::new(engine);
    let found = try_seeds(seeds.range, chooser, |trial| {
        on_threads(&trial.whole, &trial.parts, trial.seed, &mut ranks)
    });
    let tally = found.unwrap_or_else(|found| panic!("{found}"));
    assert!(tally.ran >= seeds.at_least, "{} of {} ran: {tally:#?}", tally.ran, seeds.at_least);
}

#[test]
fn random_choices_run_on_ranks() {
    if gpu::is_here("random_choices_run_on_ranks") {
        check(Chooser::Random, 200);
    }
}

#[test]
fn the_partitioners_choices_run_on_ranks() {
    if gpu::is_here("the_partitioners_choices_run_on_ranks") {
        check(Chooser::Partitioner, 100);
    }
}
