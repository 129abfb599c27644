//! The core property: random programs on random meshes with random annotations, on simulated ranks,
//! equal the reference interpreter on whole tensors, in forward and gradients, cut either way.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx_autodiff::{Joint, Recompute, joint, slice};
use phalanx_ir::{DType, Program, Role, verify};
use phalanx_reference::Tensor;
use phalanx_spmd::{Costs, SpmdError, partition, partition_by};
use phalanx_testing::cases::{Case, Dice, case, numbers};
use phalanx_testing::run_on_ranks;

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
            let scale = b.iter().fold(1.0f64, |m, x| m.max(x.abs()));
            let off = a
                .iter()
                .zip(&b)
                .map(|(x, y)| (x - y).abs())
                .fold(0.0, |m: f64, x| if x.is_nan() { f64::INFINITY } else { m.max(x) });
            assert!(off <= 1e-10 * scale, "{} `{name}` is off by {off:e}", programs[0].name);
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
    println!("{ran} ran, {refused:#?} refused");
    (ran, refused)
}

#[test]
fn random_choices_are_right() {
    let (ran, refused) = try_seeds(0..600, true);
    assert!(ran > 400, "{ran} ran; {refused:#?}");
}

#[test]
fn the_partitioners_choices_are_right() {
    let (ran, refused) = try_seeds(0..600, false);
    assert!(ran > 400, "{ran} ran; {refused:#?}");
}
