//! Random programs, partitioned by the partitioner and at random, with their gradients and the
//! passes that scripts run, on ranks that are threads: the numbers are the interpreter's.

use phalanx_autodiff::joint;
use phalanx_cpu::CpuEngine;
use phalanx_ir::{DType, Program, verify};
use phalanx_passes::{common, dead_code, fold_add, fuse, sort_free};
use phalanx_reference::Tensor;
use phalanx_spmd::{Costs, SpmdError, partition, partition_by};
use phalanx_testing::cases::{Case, Dice, case, numbers};
use phalanx_testing::threads::{furthest, on_ranks};

/// Runs one program on ranks and compares it with the whole one.
///
/// Some cases are products of products of products: scores of many thousands, whose exponentials
/// magnify the rounding of sums taken in another order. How much, the same engine on one rank shows.
fn compare(whole: &Program, parts: &Program, seed: u64, threads: usize) -> Result<(), String> {
    let known = numbers(whole, seed);
    let named: Vec<(&str, Tensor)> = known.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let expected = phalanx_reference::run(whole, &named).map_err(|e| e.to_string())?;
    let inputs: Vec<Tensor> = parts.inputs().iter().map(|p| known[&p.name].clone()).collect();
    let engine = |endpoint| CpuEngine::on_rank(threads, Box::new(endpoint)).unwrap();
    let found = on_ranks(parts, &inputs, None, engine)?;
    let given: Vec<Tensor> = whole.inputs().iter().map(|p| known[&p.name].clone()).collect();
    let alone = on_ranks(whole, &given, None, engine)?;
    let noise = |i: usize| furthest(&alone[i], &expected[i].1);
    let tolerance = (0..alone.len()).map(|i| 100.0 * noise(i)).fold(1e-10, f64::max);
    for (port, found) in parts.outputs().iter().zip(&found) {
        let wanted = expected.iter().find(|(name, _)| *name == port.name);
        let (_, wanted) = wanted.ok_or_else(|| format!("no output `{}`", port.name))?;
        let off = furthest(found, wanted);
        if off > tolerance {
            return Err(format!("`{}` is off by {off:e}, not {tolerance:e}", port.name));
        }
    }
    Ok(())
}

/// Tries seeds, and says how many could be partitioned.
fn try_seeds(seeds: std::ops::Range<u64>, random: bool) -> usize {
    let mut ran = 0;
    for seed in seeds {
        let partitioned = || -> Result<(Program, Program), SpmdError> {
            let Case { forward, mesh, annotations } = case(seed)?;
            let whole = joint(&forward, DType::F64)?;
            let mut dice = Dice::new(seed ^ 0x5eed);
            let parts = match random {
                true => partition_by(&whole, &mesh, &annotations, |n| dice.below(n))?,
                false => partition(&whole, &mesh, &annotations, &Costs::default())?,
            };
            Ok((whole.program, parts.program))
        };
        let Ok((whole, parts)) = partitioned() else { continue };
        let passed = fuse(&sort_free(&dead_code(&fold_add(&common(&parts)))));
        verify(&passed).unwrap();
        for (program, threads) in [(&parts, 1), (&passed, 1 + seed as usize % 2)] {
            if let Err(why) = compare(&whole, program, seed, threads) {
                panic!("seed {seed} (random {random}), {threads} threads: {why}\n{program}");
            }
        }
        ran += 1;
    }
    ran
}

fn seeds() -> std::ops::Range<u64> {
    let asked = std::env::var("PHALANX_PARTITION_SEEDS").ok().and_then(|n| n.parse().ok());
    0..asked.unwrap_or(150)
}

#[test]
fn random_choices_run_on_ranks() {
    let ran = try_seeds(seeds(), true);
    assert!(ran > 90, "only {ran} ran");
}

#[test]
fn the_partitioners_choices_run_on_ranks() {
    let ran = try_seeds(seeds(), false);
    assert!(ran > 90, "only {ran} ran");
}
