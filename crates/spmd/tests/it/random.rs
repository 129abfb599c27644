//! The core property on simulated ranks: random programs on random meshes with random annotations
//! equal the reference interpreter on whole tensors, in forward and gradients, in one program and cut
//! into phases. On ranks that are threads it is checked with the engine that runs there.

use phalanx_testing::Seeds;
use phalanx_testing::cases::{Chooser, try_seeds};
use phalanx_testing::checks::on_simulated_ranks;

/// How many cases each chooser is tried with.
const CASES: usize = 360;

fn check(chooser: Chooser) {
    let seeds = Seeds::for_cases(CASES);
    println!("seeds {:?}, chosen by {chooser:?}", seeds.range);
    let found = try_seeds(seeds.range, chooser, |trial| {
        on_simulated_ranks(&trial.whole, &trial.parts, trial.seed)
    });
    let tally = found.unwrap_or_else(|found| panic!("{found}"));
    println!("{} cases, with {:?}", tally.ran, tally.with);
    assert!(tally.ran >= seeds.at_least, "{} of {} ran: {tally:#?}", tally.ran, seeds.at_least);
}

#[test]
fn random_choices_are_right() {
    check(Chooser::Random);
}

#[test]
fn the_partitioners_choices_are_right() {
    check(Chooser::Partitioner);
}
