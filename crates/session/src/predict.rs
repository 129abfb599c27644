//! How long a step would take, predicted from its scripts before any rank starts.
//!
//! A rank does the actions of its script one after the other: on a CPU all its lanes share its
//! cores. In a pipeline the busiest stage group decides; it also waits for the first micro-batch to
//! arrive and for the last one to leave.

use phalanx_cost::{Hardware, Transfer, seconds};
use phalanx_script::{Entry, Kind, Script, Write};

use crate::{Lowered, Planner};
use phalanx_error::Result;

/// Predicted seconds of a training step.
pub fn step_seconds(lowered: &Lowered) -> Result<f64> {
    let (stage_groups, planner) = (lowered.stage_groups(), Planner::new(lowered)?);
    let mut busiest: f64 = 0.0;
    for stage_group in &stage_groups {
        // All ranks of a stage group do the same.
        let script = planner.train_script(stage_group.ranks[0])?;
        busiest = busiest.max(action_seconds(&script, lowered.settings.threads).iter().sum());
    }
    let parts = lowered.settings.microbatches;
    Ok(busiest * (parts + stage_groups.len() - 1) as f64 / parts as f64)
}

/// Seconds of each action of a script by itself, on a rank with so many threads.
pub fn action_seconds(script: &Script, threads: usize) -> Vec<f64> {
    let hardware = &Hardware::cpu(threads);
    let once = |entry: &Entry| seconds(entry.program(), hardware);
    let programs: Vec<f64> = script.programs.iter().map(once).collect();
    let action = |kind: &Kind| match kind {
        // Only the receiver counts the bytes.
        Kind::Receive { messages, .. } => {
            let each = messages.iter().map(|m| Transfer::message(m.bytes()));
            each.map(|transfer| hardware.transfer_seconds(transfer)).sum()
        }
        _ => 0.0,
    };
    let run = |run: &phalanx_script::Run| {
        let program = script.programs[run.program.0].program();
        // An accumulator is read as well.
        let added = run.outputs.iter().zip(program.outputs());
        let added = added.filter(|((_, write), _)| *write == Write::Add);
        let read: usize =
            added.map(|(_, port)| program.ty(port.value).local_bytes(program.mesh())).sum();
        programs[run.program.0] + hardware.memory_seconds(read as f64)
    };
    script.actions.iter().map(|a| a.run().map_or_else(|| action(&a.kind), run)).collect()
}
