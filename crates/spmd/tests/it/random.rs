//! The core property: random programs on random meshes with random annotations, on simulated ranks,
//! equal the reference interpreter on whole tensors, in forward and gradients, cut either way.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx_autodiff::{Joint, Recompute, joint, slice};
use phalanx_ir::{DType, Program, Role, verify};
use phalanx_reference::Tensor;
use phalanx_spmd::{Costs, SpmdError, partition, partition_by};
use phalanx_testing::cases::{Case, Dice, case, numbers};
use phalanx_testing::{Bug, run_on_ranks, run_with};

type Numbers = BTreeMap<String, Tensor>;

/// Runs programs one after the other, each from the inputs and what earlier ones left.
fn chain(programs: &[&Program], inputs: &Numbers, on_ranks: bool) -> Numbers {
    let mut known = inputs.clone();
    let mut results = BTreeMap::new();
    for program in programs {
        verify(program).unwrap();
        let given: Numbers =
            (program.inputs().iter()).map(|p| (p.name.clone(), known[&p.name].clone())).collect();
        let outputs: Numbers = match on_ranks {
            true => run_on_ranks(program, &given),
            false => {
                let given: Vec<(&str, Tensor)> =
                    given.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
                phalanx_reference::run(program, &given).unwrap().into_iter().collect()
            }
        };
        for port in program.outputs() {
            let tensor = outputs[&port.name].clone();
            match port.role {
                Role::Residual => known.insert(port.name.clone(), tensor),
                _ => results.insert(port.name.clone(), tensor),
            };
        }
    }
    results
}

/// Compares a partitioned joint graph with the whole one, whole and in phases.
pub(crate) fn compare(whole: &Joint, parts: &Joint, seed: u64) {
    let inputs = numbers(&whole.program, seed);
    let expected = chain(&[&whole.program], &inputs, false);
    let cut = slice(parts, Recompute::None);
    let full = slice(parts, Recompute::Full);
    for programs in [
        vec![&parts.program],
        vec![&cut.f, &cut.bw],
        vec![&cut.f, &cut.b, &cut.w],
        vec![&full.f, &full.bw],
    ] {
        let found = chain(&programs, &inputs, true);
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, tensor) in &found {
            let (a, b) = (tensor.values(), expected[name].values());
            assert!(close(&a, &b), "{} `{name}`: {a:?}, not {b:?}", programs[0].name);
        }
    }
}

/// Tries seeds; how many ran, how many were refused and for what.
fn try_seeds(seeds: std::ops::Range<u64>, random: bool) -> (usize, BTreeMap<String, usize>) {
    let (mut ran, mut refused) = (0, BTreeMap::new());
    for seed in seeds {
        let partitioned = || -> Result<(), SpmdError> {
            let Case { forward, mesh, annotations } = case(seed)?;
            let whole = joint(&forward, DType::F64)?;
            let mut dice = Dice::new(seed ^ 0x5eed);
            let parts = match random {
                true => partition_by(&whole, &mesh, &annotations, |n| dice.below(n))?,
                false => partition(&whole, &mesh, &annotations, &Costs::default())?,
            };
            let result = catch_unwind(AssertUnwindSafe(|| compare(&whole, &parts, seed)));
            if result.is_err() {
                panic!("seed {seed} (random {random}) on {mesh}\n{forward}\n{}", parts.program);
            }
            Ok(())
        };
        match partitioned() {
            Ok(()) => ran += 1,
            Err(error @ SpmdError::Verify(_)) => panic!("seed {seed} (random {random}): {error}"),
            Err(error) => {
                let text: String = error.to_string().chars().take(60).collect();
                *refused.entry(text).or_default() += 1;
            }
        }
    }
    (ran, refused)
}

/// The seeds of a run: `PHALANX_SEEDS=1000..5000` tries others than the usual ones.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("PHALANX_SEEDS") else { return 0..400 };
    let (from, to) = text.split_once("..").expect("PHALANX_SEEDS is from..to");
    from.parse().unwrap()..to.parse().unwrap()
}

/// Few cases may be refused, else nothing would be tested.
fn check(random: bool) {
    let seeds = seeds();
    let count = seeds.end - seeds.start;
    let (ran, refused) = try_seeds(seeds, random);
    assert!(ran as u64 >= count * 9 / 10, "{ran} of {count} ran; {refused:#?}");
}

#[test]
fn random_choices_are_right() {
    check(true);
}

#[test]
fn the_partitioners_choices_are_right() {
    check(false);
}

/// How many cases it takes to find a bug in collectives, up to a limit.
fn cases_to_find(bug: Bug, limit: u64) -> Option<u64> {
    (0..limit).find(|&seed| {
        let Ok(Case { forward, mesh, annotations }) = case(seed) else { return false };
        let whole = joint(&forward, DType::F64).unwrap();
        let mut dice = Dice::new(seed ^ 0x5eed);
        let parts = partition_by(&whole, &mesh, &annotations, |n| dice.below(n));
        let Ok(parts) = parts else { return false };
        let inputs = numbers(&whole.program, seed);
        let expected = chain(&[&whole.program], &inputs, false);
        let found = catch_unwind(AssertUnwindSafe(|| run_with(&parts.program, &inputs, Some(bug))));
        // Replicas that differ stop the run, which is as good as a wrong number.
        let Ok(found) = found else { return true };
        found.iter().any(|(name, tensor)| !close(&tensor.values(), &expected[name].values()))
    })
}

fn close(a: &[f64], b: &[f64]) -> bool {
    let scale = b.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-10 * scale)
}

/// The stated numbers of cases within which each planted bug is found.
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let limit = if bug == Bug::NoPermute { 60 } else { 15 };
        let found = cases_to_find(bug, limit);
        assert!(found.is_some(), "{bug:?} is not found in {limit} cases");
    }
}
