//! Whether a schedule loses nothing, doubles nothing, and cannot deadlock.
//!
//! *Complete*: on every stage each micro-batch has exactly one F, one B and one W, on one device, in
//! that order, all with the same version of the weights, and in one replica of the model.
//!
//! *No deadlock*: devices run their lists in order, and messages pass **lanes**, one for each ordered
//! pair of devices and each direction through the model. A lane delivers in order, and a send ends
//! only when it is received. So messages must be made in the order in which they are needed, and
//! turns and messages together must not wait for each other in a circle.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::error::{PipelineError, Result};
use crate::flow::{At, Index, Message, Phase};
use crate::placement::{Held, Placement};
use crate::schedule::Schedule;
use crate::turn::Turn;

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

/// Refuses a schedule whose turns and messages would wait for each other in a circle.
pub(crate) fn no_deadlock(schedule: &Schedule) -> Result<()> {
    let graph = Waits::new(schedule);
    match graph.circle() {
        None => Ok(()),
        Some(circle) => {
            let lines = circle.iter().zip(circle.iter().cycle().skip(1));
            let circle = lines.map(|(a, b)| {
                format!("{} waits for {}", graph.words(schedule, *a), graph.words(schedule, *b))
            });
            Err(PipelineError::Deadlock { circle: circle.collect() })
        }
    }
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

/// Who waits for whom: turns first, then messages.
struct Waits {
    turns: Vec<At>,
    messages: Vec<Message>,
    /// For every turn and message, those it waits for.
    on: Vec<Vec<usize>>,
}

impl Waits {
    fn new(schedule: &Schedule) -> Self {
        let turns: Vec<At> = schedule.all().map(|(at, _)| at).collect();
        let firsts: Vec<usize> = (0..schedule.devices())
            .scan(0, |next, device| {
                Some(std::mem::replace(next, *next + schedule.turns(device).len()))
            })
            .collect();
        let number = |at: At| firsts[at.device] + at.index;
        let messages = schedule.messages();
        let mut on = vec![Vec::new(); turns.len() + messages.len()];
        for (node, at) in turns.iter().enumerate() {
            if at.index > 0 {
                on[node].push(node - 1);
            }
            let own = schedule.needs(*at).filter(|(needed, _)| needed.device == at.device);
            on[node].extend(own.map(|(needed, _)| number(needed)));
        }
        for (message, node) in messages.iter().zip(turns.len()..) {
            on[node].push(number(message.from));
            on[number(message.to)].push(node);
        }
        // Messages come in the order in which receivers need them; senders make them in another.
        let received: Vec<usize> = (0..messages.len()).collect();
        let mut sent = received.clone();
        sent.sort_by_key(|&k| messages[k].from);
        for order in [received, sent] {
            let mut last = HashMap::new();
            for k in order {
                let message = &messages[k];
                let lane = (message.from.device, message.to.device, message.direction);
                if let Some(before) = last.insert(lane, turns.len() + k) {
                    on[turns.len() + k].push(before);
                }
            }
        }
        Waits { turns, messages, on }
    }

    /// Some that wait for each other, if any do.
    fn circle(&self) -> Option<Vec<usize>> {
        let mut followers = vec![Vec::new(); self.on.len()];
        for (node, on) in self.on.iter().enumerate() {
            on.iter().for_each(|&needed| followers[needed].push(node));
        }
        let mut left: Vec<usize> = self.on.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = (0..left.len()).filter(|&node| left[node] == 0).collect();
        while let Some(node) = ready.pop() {
            for &follower in &followers[node] {
                left[follower] -= 1;
                if left[follower] == 0 {
                    ready.push(follower);
                }
            }
        }
        // Whoever is left waits for somebody who is left: following that ends in a circle.
        let mut seen = vec![false; left.len()];
        let mut node = left.iter().position(|&count| count > 0)?;
        while !std::mem::replace(&mut seen[node], true) {
            node = self.on[node].iter().copied().find(|&on| left[on] > 0)?;
        }
        self.way_round(node)
    }

    /// The shortest way from a node back to itself.
    fn way_round(&self, start: usize) -> Option<Vec<usize>> {
        let mut waiter = vec![None; self.on.len()];
        let mut queue = VecDeque::from([start]);
        while let Some(node) = queue.pop_front() {
            for &on in &self.on[node] {
                if waiter[on].is_none() {
                    waiter[on] = Some(node);
                    queue.push_back(on);
                }
            }
        }
        let mut path = vec![waiter[start]?];
        while let Some(last) = path.last().copied().filter(|&last| last != start) {
            path.push(waiter[last]?);
        }
        path.reverse();
        Some(path)
    }

    fn words(&self, schedule: &Schedule, node: usize) -> String {
        let place =
            |at: At| format!("device {}, turn {} ({})", at.device, at.index, schedule.turn(at));
        match self.turns.get(node) {
            Some(at) => place(*at),
            None => {
                let Message { from, to, .. } = self.messages[node - self.turns.len()];
                format!("the message from {} to {}", place(from), place(to))
            }
        }
    }
}
