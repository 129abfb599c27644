//! That the core property can fail: bugs are planted in what ranks do, and random cases find each of
//! them within the stated number, by wrong numbers or by replicas that differ. What is told then is
//! a small case.

use phalanx_testing::cases::{Chooser, Found, try_seeds};
use phalanx_testing::checks::{simulated_ring_with_bug, with_bug};
use phalanx_testing::{Bug, RingBug};

/// Every bug, within how many cases it must be found, and how many instructions the forward program
/// of the smallest case may have.
const BUGS: [(Bug, usize, usize); 32] = [
    (Bug::GatherOrder, 10, 1),
    (Bug::ScatterOrder, 10, 1),
    (Bug::ExchangeOrder, 10, 1),
    (Bug::ExchangeSwapped, 10, 1),
    (Bug::ShardOrder, 10, 1),
    (Bug::WrongSlice, 20, 3),
    (Bug::WrongGroup, 20, 3),
    (Bug::NoPermute, 20, 3),
    (Bug::PartialEverywhere, 10, 1),
    (Bug::ForgottenShare, 10, 1),
    (Bug::DoubledShare, 10, 1),
    (Bug::PaddingCounts, 50, 3),
    (Bug::LocalMask, 50, 1),
    (Bug::LocalPositions, 50, 3),
    // A loss is three.
    (Bug::LocalStatistics, 10, 3),
    (Bug::LostSum, 10, 1),
    (Bug::SumTwice, 10, 1),
    (Bug::ProductOfPartials, 300, 4),
    (Bug::FunctionOfPartial, 600, 3),
    (Bug::PartialPlusWhole, 20, 3),
    (Bug::PartialBesideWhole, 300, 4),
    (Bug::GradientNotPartial, 10, 1),
    (Bug::MergedAxesReversed, 10, 1),
    (Bug::WrongPartOfAxis, 20, 3),
    (Bug::StaleLayout, 20, 3),
    (Bug::BlockTwice, 20, 10),
    (Bug::BlockElsewhere, 10, 2),
    (Bug::BlockMisplaced, 20, 10),
    (Bug::ZigzagAsBlocks, 30, 3),
    // Images are taken from a sequence and put back into one.
    (Bug::RowTooFew, 30, 4),
    (Bug::RowsOfWrongNeighbour, 30, 4),
    // The first uneven height that is cut lies behind an attention, which is ten.
    (Bug::PaddingRows, 60, 14),
];

/// The first of so many cases that finds a bug.
fn find(bug: Bug, within: usize) -> Option<Box<Found>> {
    let (mut passed, mut failed) = (0, false);
    // Some seeds are refused and are no cases.
    let found = try_seeds(0..2 * within as u64, Chooser::Random, |trial| {
        // A failure is made smaller by more cases, which do not count.
        if passed == within && !failed {
            return Ok(());
        }
        let outcome = with_bug(&trial.whole, &trial.parts, trial.seed, bug);
        passed += usize::from(outcome.is_ok());
        failed |= outcome.is_err();
        outcome
    });
    found.err()
}

#[test]
fn every_planted_bug_is_found_and_told_as_a_small_case() {
    let mut wrong = Vec::new();
    for (bug, within, ops) in BUGS {
        let Some(found) = find(bug, within) else {
            wrong.push(format!("{bug:?} is not found in {within} cases"));
            continue;
        };
        println!("{bug:?}: case {}, {} instructions", found.after + 1, found.ops());
        if found.ops() > ops {
            wrong.push(format!("{bug:?}: {} instructions\n{found}", found.ops()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every bug in a ring of keys is found.
#[test]
fn bugs_of_rings_are_found() {
    for bug in RingBug::ALL {
        let found = try_seeds(0..RING_SEEDS, Chooser::Partitioner, |trial| {
            simulated_ring_with_bug(&trial.whole, &trial.parts, trial.seed, bug)
        });
        let found = found.expect_err(&format!("{bug:?} is not found"));
        println!("{bug:?}: case {}, {} instructions", found.after + 1, found.ops());
        assert!(found.ops() <= 12, "{bug:?}: {found}");
    }
}

/// Some of so many cases have a ring.
const RING_SEEDS: u64 = 30;

/// The seed, the mesh, the program, what was asked and what was made of it.
#[test]
fn a_failure_says_everything_that_is_needed() {
    let found = find(Bug::LostSum, 10).unwrap();
    let text = found.to_string();
    let seed = format!("PHALANX_SEEDS={}..{}", found.seed, found.seed + 1);
    for part in [seed.as_str(), "on the mesh ", "program case {", "return y", "all_reduce<"] {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
    assert_eq!(found.ranks(), 2, "{text}");
    assert!(text.lines().count() < 40, "{text}");
}
