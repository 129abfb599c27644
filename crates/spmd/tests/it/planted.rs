//! That the core property can fail: bugs are planted in what ranks do, and random cases find each of
//! them within the stated number, by wrong numbers or by replicas that differ; a failure is told as a
//! small case.

use phalanx_testing::Bug;
use phalanx_testing::cases::{Chooser, try_seeds};
use phalanx_testing::checks::with_bug;

/// Every bug, and within how many cases it must be found.
const BUGS: [(Bug, usize); 23] = [
    (Bug::GatherOrder, 1000),
    (Bug::ScatterOrder, 1000),
    (Bug::ExchangeOrder, 1000),
    (Bug::ExchangeSwapped, 1000),
    (Bug::ShardOrder, 1000),
    (Bug::WrongSlice, 1000),
    (Bug::WrongGroup, 1000),
    (Bug::NoPermute, 1000),
    (Bug::PartialEverywhere, 1000),
    (Bug::ForgottenShare, 1000),
    (Bug::DoubledShare, 1000),
    (Bug::PaddingCounts, 1000),
    (Bug::LocalMask, 1000),
    (Bug::LocalStatistics, 1000),
    (Bug::LostSum, 1000),
    (Bug::SumTwice, 1000),
    (Bug::ProductOfPartials, 1000),
    (Bug::FunctionOfPartial, 1000),
    (Bug::PartialPlusWhole, 1000),
    (Bug::GradientNotPartial, 1000),
    (Bug::MergedAxesReversed, 1000),
    (Bug::WrongPartOfAxis, 1000),
    (Bug::StaleLayout, 1000),
];

#[test]
fn every_planted_bug_is_found() {
    for (bug, within) in BUGS {
        let mut tried = 0;
        let found = try_seeds(0..10 * within as u64, Chooser::Random, |trial| {
            tried += 1;
            if tried > within {
                return Ok(());
            }
            with_bug(&trial.whole, &trial.parts, trial.seed, bug)
        });
        match found {
            Err(found) => println!(
                "{bug:?}: {} {} ops {} ranks\n{found}",
                found.after + 1,
                found.ops(),
                found.ranks()
            ),
            Ok(_) => println!("{bug:?} not found"),
        }
    }
}
