//! Orders in which a step can be run, beside those that users get: they must all give the same.

use phalanx_ir::random::Stream;
use phalanx_script::{Lane, Part, Script, Step, accumulate};

/// Each BW as B and, at once, W.
pub fn split(instances: usize, microbatches: usize) -> Vec<Step> {
    let parts = |step: Step| match step.part {
        Part::BW => vec![Part::B, Part::W],
        part => vec![part],
    };
    (accumulate(instances, microbatches).into_iter())
        .flat_map(|step| parts(step).into_iter().map(move |part| Step { part, ..step }))
        .collect()
}

/// Each micro-batch's W only after all its B.
pub fn deferred(instances: usize, microbatches: usize) -> Vec<Step> {
    let parts = [Part::F, Part::B, Part::W];
    (0..microbatches)
        .flat_map(|microbatch| parts.map(|part| sweep(part, instances, microbatch)))
        .flatten()
        .collect()
}

/// All F, then all BW, as a pipeline's stage has its micro-batches in flight.
pub fn in_flight(instances: usize, microbatches: usize) -> Vec<Step> {
    phase_by_phase(&[Part::F, Part::BW], instances, microbatches)
}

/// All F, then all B, then all W.
pub fn all_deferred(instances: usize, microbatches: usize) -> Vec<Step> {
    phase_by_phase(&[Part::F, Part::B, Part::W], instances, microbatches)
}

/// Spreads a script's actions over lanes without rhyme or reason, so that nothing but buffers
/// orders them.
pub fn spread_lanes(script: &mut Script) {
    let lanes = [Lane::Compute, Lane::Gather, Lane::Reduce, Lane::Copy, Lane::Host];
    let stream = Stream::named(11, "lanes");
    for (index, action) in script.actions.iter_mut().enumerate() {
        action.lane = lanes[stream.below(index as u64, lanes.len() as u64) as usize];
    }
}

fn phase_by_phase(parts: &[Part], instances: usize, microbatches: usize) -> Vec<Step> {
    (parts.iter())
        .flat_map(|&part| (0..microbatches).map(move |mb| sweep(part, instances, mb)))
        .flatten()
        .collect()
}

/// One part of every instance: forwards in order, the rest in reverse.
fn sweep(part: Part, instances: usize, microbatch: usize) -> Vec<Step> {
    let mut steps: Vec<Step> =
        (0..instances).map(|instance| Step { instance, part, microbatch }).collect();
    if part != Part::F {
        steps.reverse();
    }
    steps
}
