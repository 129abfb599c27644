//! The core property: a partitioned program on ranks equals the whole one in the interpreter, in f64
//! and within 1e-10, forward and gradients.

use std::collections::BTreeMap;

use phalanx_autodiff::{Joint, Recompute, slice};
use phalanx_comm::Communicator;
use phalanx_engine::Engine;
use phalanx_ir::{Axis, Program, Role, verify};
use phalanx_passes::{common, dead_code, fold_add, fuse, overlap, sort_free, stream};
use phalanx_reference::RefTensor;

use crate::cases::numbers;
use crate::ranks::{Bug, run_on_ranks, run_with};
use crate::ring_bugs::RingBug;
use crate::threads::{Ranks, furthest};

type Numbers = BTreeMap<String, RefTensor>;

const TOLERANCE: f64 = 1e-10;

/// Compares them on simulated ranks, as one program and split into phases, gathered and block by block.
pub fn on_simulated_ranks(whole: &Joint, parts: &Joint, seed: u64) -> Result<(), String> {
    let inputs = numbers(&whole.program, seed);
    let expected = interpreted(&whole.program, &inputs)?;
    let cut = slice(parts, Recompute::None);
    let full = slice(parts, Recompute::Full);
    let streamed = in_blocks(&parts.program);
    let blocks = slice(&Joint::from(streamed), Recompute::Full);
    for programs in [
        vec![&parts.program],
        vec![&cut.f, &cut.bw],
        vec![&cut.f, &cut.b, &cut.w],
        vec![&full.f, &full.bw],
        vec![&blocks.f, &blocks.b, &blocks.w],
    ] {
        let found = chain(&programs, &inputs)?;
        same(&found, &expected, TOLERANCE).map_err(|e| format!("{}: {e}", programs[0].name))?;
    }
    Ok(())
}

/// Compares them on simulated ranks that have a bug.
pub fn with_bug(whole: &Joint, parts: &Joint, seed: u64, bug: Bug) -> Result<(), String> {
    let inputs = numbers(&whole.program, seed);
    let program = match bug.is_of_streams() {
        true => in_blocks(&parts.program),
        false => parts.program.clone(),
    };
    match run_with(&program, &inputs, bug) {
        None => Ok(()),
        Some(found) => same(&found?, &interpreted(&whole.program, &inputs)?, TOLERANCE),
    }
}

/// Compares them on ranks that are threads, as the partitioner made them and after the passes that
/// scripts run.
///
/// Some cases are products of products of products: scores of many thousands, whose exponentials
/// magnify the rounding of sums taken in another order. The same engine on one rank shows how much.
pub fn on_threads<E, F>(
    whole: &Joint,
    parts: &Joint,
    seed: u64,
    ranks: &mut Ranks<E, F>,
) -> Result<(), String>
where
    E: Engine + Send,
    F: Fn(Box<dyn Communicator>) -> E + Sync,
{
    let inputs = numbers(&whole.program, seed);
    let expected = interpreted(&whole.program, &inputs)?;
    let folded = fold_add(&common(&parts.program));
    let passed = fuse(&sort_free(&dead_code(&folded)));
    verify(&passed).map_err(|e| e.to_string())?;
    let streamed = streamed(&folded)?;
    let mut run = |program: &Program| -> Result<Numbers, String> {
        let given: Vec<RefTensor> =
            program.inputs().iter().map(|p| inputs[&p.name].clone()).collect();
        let found = ranks.run(program, &given, None)?;
        Ok(program.outputs().iter().map(|p| p.name.clone()).zip(found).collect())
    };
    let forms = [("as emitted", &parts.program), ("after passes", &passed)];
    for (what, program) in forms.into_iter().chain(streamed.iter().map(|p| ("in blocks", p))) {
        let found = run(program).map_err(|e| format!("{what}: {e}"))?;
        if same(&found, &expected, TOLERANCE).is_ok() {
            continue;
        }
        let alone = run(&whole.program)?;
        let noise = expected.iter().map(|(name, tensor)| furthest(&alone[name], tensor));
        let tolerance = noise.map(|off| 100.0 * off).fold(TOLERANCE, f64::max);
        same(&found, &expected, tolerance).map_err(|e| format!("{what}: {e}"))?;
    }
    Ok(())
}

/// Compares them on simulated ranks, block by block with a bug in a ring; nothing to compare is no failure.
pub fn simulated_ring_with_bug(
    whole: &Joint,
    parts: &Joint,
    seed: u64,
    bug: RingBug,
) -> Result<(), String> {
    let Some(program) = bug.planted_in(&in_blocks(&parts.program)) else { return Ok(()) };
    let inputs = numbers(&whole.program, seed);
    same(&run_on_ranks(&program, &inputs)?, &interpreted(&whole.program, &inputs)?, FAR_OFF)
}

/// Compares them on ranks that are threads, block by block with a bug in a ring; nothing to compare is no failure.
/// Only what is far off counts, so that rounding is not taken for the bug.
pub fn ring_with_bug<E, F>(
    whole: &Joint,
    parts: &Joint,
    seed: u64,
    ranks: &mut Ranks<E, F>,
    bug: RingBug,
) -> Result<(), String>
where
    E: Engine + Send,
    F: Fn(Box<dyn Communicator>) -> E + Sync,
{
    let blocks = in_blocks(&fold_add(&common(&parts.program)));
    let Some(program) = bug.planted_in(&blocks) else { return Ok(()) };
    let inputs = numbers(&whole.program, seed);
    let given: Vec<RefTensor> = program.inputs().iter().map(|p| inputs[&p.name].clone()).collect();
    let found = ranks.run(&program, &given, None)?;
    let found = program.outputs().iter().map(|p| p.name.clone()).zip(found).collect();
    same(&found, &interpreted(&whole.program, &inputs)?, FAR_OFF)
}

/// A relative difference that no rounding makes.
const FAR_OFF: f64 = 1e-4;

/// The program whose products and attentions go block by block over every axis.
fn in_blocks(program: &Program) -> Program {
    let axes: Vec<Axis> = program.mesh().axes().map(|(axis, _)| axis).collect();
    stream(program, &axes)
}

/// How many instructions early collectives start in what [`on_threads`] runs block by block.
const AHEAD: usize = 4;

/// The same as scripts run it, if anything goes block by block.
fn streamed(folded: &Program) -> Result<Option<Program>, String> {
    let blocks = in_blocks(folded);
    if blocks == *folded {
        return Ok(None);
    }
    let program = overlap(&fuse(&sort_free(&dead_code(&blocks))), AHEAD);
    verify(&program).map_err(|e| format!("in blocks: {e}"))?;
    Ok(Some(program))
}

fn interpreted(program: &Program, inputs: &Numbers) -> Result<Numbers, String> {
    let given: Vec<(&str, RefTensor)> =
        program.inputs().iter().map(|p| (p.name.as_str(), inputs[&p.name].clone())).collect();
    let outputs = phalanx_reference::run(program, &given).map_err(|e| e.to_string())?;
    Ok(outputs.into_iter().collect())
}

/// Runs programs one after the other, each from the inputs and what earlier ones left.
fn chain(programs: &[&Program], inputs: &Numbers) -> Result<Numbers, String> {
    let mut known = inputs.clone();
    let mut results = BTreeMap::new();
    for program in programs {
        verify(program).map_err(|e| e.to_string())?;
        let mut outputs = run_on_ranks(program, &known)?;
        for port in program.outputs() {
            let Some(tensor) = outputs.remove(&port.name) else { continue };
            match port.role {
                Role::Residual => known.insert(port.name.clone(), tensor),
                _ => results.insert(port.name.clone(), tensor),
            };
        }
    }
    Ok(results)
}

fn same(found: &Numbers, expected: &Numbers, tolerance: f64) -> Result<(), String> {
    if !found.keys().eq(expected.keys()) {
        return Err(format!("outputs {:?}, not {:?}", found.keys(), expected.keys()));
    }
    for (name, tensor) in found {
        let off = furthest(tensor, &expected[name]);
        if off > tolerance {
            return Err(format!("`{name}` is off by {off:e}, not {tolerance:e}"));
        }
    }
    Ok(())
}
