//! Whether lists of turns lose nothing and double nothing.
//!
//! On every stage each micro-batch has exactly one F, one B and one W, on one device, in that order,
//! all with the same version of the weights, and in one replica of the model.

use std::collections::HashSet;

use phalanx_script::Part;

use crate::error::{PipelineError, Result};
use crate::flow::{At, Index, Phase};
use crate::placement::{Held, Placement};
use crate::turn::Turn;

/// Refuses second forwards in lists that somebody wrote: they follow from what a stage keeps, and are
/// no part of the order in which micro-batches pass.
pub(crate) fn listed(turns: &[Vec<Turn>]) -> Result<()> {
    for (device, list) in turns.iter().enumerate() {
        if let Some(index) = list.iter().position(|turn| turn.part == Part::R) {
            let why = "a second forward belongs to its backward: leave it out of the list";
            return Err(wrong(At { device, index }, &list[index], why.to_owned()));
        }
    }
    Ok(())
}

/// Finds where every phase of every micro-batch is done.
pub(crate) fn complete(
    microbatches: usize,
    placement: &Placement,
    turns: &[Vec<Turn>],
) -> Result<Index> {
    if turns.len() != placement.devices() {
        let (lists, devices) = (turns.len(), placement.devices());
        let what = format!("there are lists for {lists} devices, and stages on {devices}");
        return Err(PipelineError::Placement { what });
    }
    if microbatches == 0 {
        return Err(PipelineError::Shape {
            what: "0 micro-batches".to_owned(),
            why: "a step takes at least one micro-batch through the stages".to_owned(),
            nearest: "1 micro-batch".to_owned(),
        });
    }
    let stages = placement.stages();
    if stages.saturating_mul(microbatches) > turns.iter().map(Vec::len).sum() {
        return Err(first_missing(microbatches, placement, turns));
    }
    let mut places: Vec<[Option<At>; 3]> = vec![[None; 3]; stages.saturating_mul(microbatches)];
    let mut replicas: Vec<Option<usize>> = vec![None; microbatches];
    for (device, list) in turns.iter().enumerate() {
        for (index, turn) in list.iter().enumerate() {
            let at = At { device, index };
            let refuse = |why| wrong(at, turn, why);
            let held = legal(placement, device, turn, microbatches).map_err(refuse)?;
            let replica = *replicas[turn.microbatch].get_or_insert(held.replica);
            if replica != held.replica {
                let here = held.replica;
                return Err(wrong(
                    at,
                    turn,
                    format!("its micro-batch goes through replica {replica}, this is {here}"),
                ));
            }
            let done = &mut places[held.stage * microbatches + turn.microbatch];
            note(done, at, turn, turns)?;
        }
    }
    let whole = |(cell, done): (usize, &[Option<At>; 3])| match done {
        [Some(f), Some(b), Some(w)] => Ok([*f, *b, *w]),
        _ => {
            let (stage, microbatch) = (cell / microbatches, cell % microbatches);
            let held = Held { stage, replica: replicas[microbatch].unwrap_or(0) };
            let phase = Phase::ALL.into_iter().find(|phase| done[*phase as usize].is_none());
            let phase = phase.map_or("F", Phase::name);
            Err(missing(placement, held, phase, microbatch, microbatches))
        }
    };
    let places = places.iter().enumerate().map(whole).collect::<Result<_>>()?;
    Ok(Index::new(places, microbatches, stages))
}

/// What is not done, where there are fewer turns than stages times micro-batches. Lists may be much
/// shorter than the numbers in them suggest, so nothing of that size is made here.
fn first_missing(microbatches: usize, placement: &Placement, turns: &[Vec<Turn>]) -> PipelineError {
    let worked = |(device, list): (usize, &Vec<Turn>)| -> Vec<(usize, usize)> {
        let held = |turn: &Turn| placement.held(device, turn.chunk);
        list.iter().filter_map(|turn| Some((held(turn)?.stage, turn.microbatch))).collect()
    };
    let worked: HashSet<(usize, usize)> = turns.iter().enumerate().flat_map(worked).collect();
    let mut cells = (0..placement.stages()).flat_map(|s| (0..microbatches).map(move |m| (s, m)));
    let (stage, microbatch) = cells.find(|cell| !worked.contains(cell)).unwrap_or_default();
    missing(placement, Held { stage, replica: 0 }, "F", microbatch, microbatches)
}

fn missing(
    placement: &Placement,
    held: Held,
    phase: &'static str,
    microbatch: usize,
    microbatches: usize,
) -> PipelineError {
    let (device, chunk) = placement.find(held).unwrap_or_default();
    let (stage, last) = (held.stage, microbatches - 1);
    PipelineError::Missing { stage, device, chunk, phase, microbatch, last }
}

/// What the turn works on, if there is such a thing.
fn legal(
    placement: &Placement,
    device: usize,
    turn: &Turn,
    microbatches: usize,
) -> Result<Held, String> {
    let Turn { microbatch, chunk, .. } = *turn;
    if microbatch >= microbatches {
        let last = microbatches - 1;
        return Err(format!("there is no micro-batch {microbatch}, only 0 to {last}"));
    }
    placement.held(device, chunk).ok_or_else(|| {
        let chunks = placement.chunks(device);
        format!("there is no chunk {chunk}: device {device} holds {chunks}")
    })
}

/// Takes down what the turn does, if it is done for the first time and not too early.
fn note(done: &mut [Option<At>; 3], at: At, turn: &Turn, turns: &[Vec<Turn>]) -> Result<()> {
    for phase in Phase::of(turn.part) {
        if let Some(first) = done[*phase as usize] {
            let (phase, micro) = (phase.name(), turn.microbatch);
            let why = format!(
                "{phase} of micro-batch {micro} is done twice; first by device {}, turn {}",
                first.device, first.index
            );
            return Err(wrong(at, turn, why));
        }
        done[*phase as usize] = Some(at);
        let Some(before) = (*phase as usize).checked_sub(1) else { continue };
        let Some(earlier) = done[before] else {
            let (needed, phase) = (Phase::ALL[before].name(), phase.name());
            let micro = turn.microbatch;
            let why = format!("{phase} of micro-batch {micro} comes before its {needed}");
            return Err(wrong(at, turn, why));
        };
        let version = turns[earlier.device][earlier.index].version;
        if version != turn.version {
            let why = format!(
                "it reads version {} of the weights, but turn {} read version {version} for the \
                 same micro-batch",
                turn.version, earlier.index
            );
            return Err(wrong(at, turn, why));
        }
    }
    Ok(())
}

fn wrong(at: At, turn: &Turn, why: String) -> PipelineError {
    PipelineError::Turn { device: at.device, index: at.index, turn: turn.to_string(), why }
}
