//! A partitioned program on simulated ranks: what every rank would hold, computed in one thread.
//!
//! Each rank has a block of every value, padding poisoned with NaN. Ops run on the valid elements of
//! local blocks, through the reference interpreter; collectives move blocks between ranks and are
//! written here a second time, after their definition. So this checks layouts and collectives, not
//! kernels, and can be wrong on purpose: tests plant [`Bug`]s to see that cases find them.

mod blocks;
mod bugs;
mod compute;
mod exchange;
mod rings;
mod windows;

use std::collections::BTreeMap;

use phalanx_ir::{Op, OpDef, Program};
use phalanx_reference::RefTensor;

use blocks::{Block, gather, scatter};
pub use bugs::Bug;
use compute::compute;
use exchange::Exchange;

/// Runs a program on all ranks of its mesh and returns its outputs as whole tensors, partial sums
/// summed. Fails where ranks that should hold the same do not.
pub fn run_on_ranks(
    program: &Program,
    inputs: &BTreeMap<String, RefTensor>,
) -> Result<BTreeMap<String, RefTensor>, String> {
    simulate(program, inputs, None)
}

/// The same with a planted bug, or nothing if this program has no place for it.
pub fn run_with(
    program: &Program,
    inputs: &BTreeMap<String, RefTensor>,
    bug: Bug,
) -> Option<Result<BTreeMap<String, RefTensor>, String>> {
    Some(simulate(&bug.planted_in(program)?, inputs, Some(bug)))
}

fn simulate(
    program: &Program,
    inputs: &BTreeMap<String, RefTensor>,
    bug: Option<Bug>,
) -> Result<BTreeMap<String, RefTensor>, String> {
    let mesh = program.mesh();
    let mut values: Vec<Vec<Block>> = vec![Vec::new(); program.values().len()];
    for port in program.inputs() {
        let tensor = inputs.get(&port.name).ok_or_else(|| format!("no input `{}`", port.name))?;
        let ty = program.ty(port.value);
        values[port.value.index()] =
            (0..mesh.ranks()).map(|rank| scatter(tensor, ty, mesh, rank)).collect();
    }
    for instr in program.instrs() {
        let results = match &instr.op {
            Op::Collective(c) => {
                let ty = program.ty(instr.inputs[0]);
                let blocks = &values[instr.inputs[0].index()];
                let rest = instr.inputs.get(1).map(|value| &values[value.index()][..]);
                let made = program.ty(instr.outputs[0]);
                vec![Exchange { mesh, ty, made, blocks, rest, bug }.run(c)?]
            }
            _ => match rings::steps(program, instr, &values) {
                Some(results) => results,
                None => compute(program, instr, &values, bug)?,
            },
        };
        for (value, blocks) in instr.outputs.iter().zip(results) {
            let expected = program.ty(*value).local_shape(mesh);
            if let Some(block) = blocks.iter().find(|block| block.shape != expected) {
                let (name, has) = (instr.op.name(), &block.shape);
                return Err(format!("{name} made {has:?} of %{}, not {expected:?}", value.0));
            }
            values[value.index()] = blocks;
        }
    }
    (program.outputs().iter())
        .map(|p| {
            let whole = gather(program.ty(p.value), mesh, &values[p.value.index()]);
            Ok((p.name.clone(), whole.map_err(|e| format!("`{}`: {e}", p.name))?))
        })
        .collect()
}
