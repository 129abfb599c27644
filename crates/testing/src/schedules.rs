//! Other orders in which a step can run: they must all give the same result.

use phalanx_ir::random::Stream;
use phalanx_script::{Lane, Part, ScheduledRun, Script, accumulate};

/// Each BW as B and, at once, W.
pub fn split(instances: usize, microbatches: usize) -> Vec<ScheduledRun> {
    let parts = |turn: ScheduledRun| match turn.part {
        Part::BW => vec![Part::B, Part::W],
        part => vec![part],
    };
    (accumulate(instances, microbatches).into_iter())
        .flat_map(|turn| parts(turn).into_iter().map(move |part| ScheduledRun { part, ..turn }))
        .collect()
}

/// Each micro-batch's W only after all its B.
pub fn deferred(instances: usize, microbatches: usize) -> Vec<ScheduledRun> {
    let parts = [Part::F, Part::B, Part::W];
    (0..microbatches)
        .flat_map(|microbatch| parts.map(|part| sweep(part, instances, microbatch)))
        .flatten()
        .collect()
}

/// All F, then all BW, as a pipeline's stage has its micro-batches in flight.
pub fn in_flight(instances: usize, microbatches: usize) -> Vec<ScheduledRun> {
    phase_by_phase(&[Part::F, Part::BW], instances, microbatches)
}

/// All F, then all B, then all W.
pub fn all_deferred(instances: usize, microbatches: usize) -> Vec<ScheduledRun> {
    phase_by_phase(&[Part::F, Part::B, Part::W], instances, microbatches)
}

/// Spreads a script's actions over lanes arbitrarily, so that only buffers order them.
pub fn spread_lanes(script: &mut Script) {
    let lanes = [Lane::Compute, Lane::Gather, Lane::Reduce, Lane::Up, Lane::Down];
    let stream = Stream::named(11, "lanes");
    for (index, action) in script.actions.iter_mut().enumerate() {
        action.lane = lanes[stream.below(index as u64, lanes.len() as u64) as usize];
    }
}

fn phase_by_phase(parts: &[Part], instances: usize, microbatches: usize) -> Vec<ScheduledRun> {
    (parts.iter())
        .flat_map(|&part| (0..microbatches).map(move |mb| sweep(part, instances, mb)))
        .flatten()
        .collect()
}

/// One part of every instance: forwards in order, the rest in reverse.
fn sweep(part: Part, instances: usize, microbatch: usize) -> Vec<ScheduledRun> {
    let mut turns: Vec<ScheduledRun> =
        (0..instances).map(|instance| ScheduledRun { instance, part, microbatch }).collect();
    if part != Part::F {
        turns.reverse();
    }
    turns
}
