//! What a script moves between ranks, from its types alone, before any rank starts.

use std::collections::BTreeMap;

use phalanx_call::traffic::{add, of_program};
use phalanx_call::{Message, Moved, Route};
use phalanx_ir::Axis;

use crate::action::{Action, Kind, Script};
use crate::together::{Class, ClassMember};

/// What the script's rank moves in one run.
pub fn traffic(script: &Script) -> BTreeMap<Route, Moved> {
    let mut total = of_programs(script, script.rank);
    for action in &script.actions {
        for (route, moved) in of_messages(&action.kind, None) {
            add(&mut total, route, moved);
        }
    }
    total
}

/// For each rank of a class: what it moves in one run of the class's script.
pub fn traffic_of_class(class: &Class<'_>) -> BTreeMap<usize, BTreeMap<Route, Moved>> {
    let script = class.script;
    let own = (script.rank, traffic(script));
    let other = |ClassMember { rank, messages }: &ClassMember| {
        let mut total = of_programs(script, *rank);
        for (action, messages) in messages {
            for (route, moved) in of_messages(&script.actions[*action].kind, Some(messages)) {
                add(&mut total, route, moved);
            }
        }
        (*rank, total)
    };
    class.others.iter().map(other).chain([own]).collect()
}

/// What the rank of a script moves for one of its actions.
pub fn of_action(script: &Script, action: &Action) -> BTreeMap<Route, Moved> {
    match action.run() {
        Some(run) => {
            let entry = &script.programs[run.program.0];
            of_program(entry.program(), entry.place(script.rank))
        }
        None => of_messages(&action.kind, None).collect(),
    }
}

/// What a rank moves in the runs of a script's programs.
fn of_programs(script: &Script, rank: usize) -> BTreeMap<Route, Moved> {
    let mut runs = vec![0; script.programs.len()];
    script.actions.iter().filter_map(Action::run).for_each(|run| runs[run.program.0] += 1);
    let mut total = BTreeMap::new();
    for (entry, runs) in script.programs.iter().zip(runs) {
        // A program without communication is run by each rank alone.
        if entry.ranks.len() < 2 {
            continue;
        }
        for (route, Moved { calls, bytes }) in of_program(entry.program(), entry.place(rank)) {
            add(&mut total, route, Moved { calls: runs * calls, bytes: runs * bytes });
        }
    }
    total
}

/// What a rank moves in sends and receives; it may have other messages than the script's own.
fn of_messages<'a>(
    kind: &'a Kind,
    instead: Option<&'a [Message]>,
) -> impl Iterator<Item = (Route, Moved)> + use<'a> {
    let moved = match kind {
        // Calls are counted at the sender; bytes at the receiver, which reads the sender's memory.
        Kind::Send { messages, .. } => {
            let messages = instead.unwrap_or(messages);
            let calls = messages.iter().map(|m| m.blocks.len() as u64).sum();
            Some(Moved { calls, bytes: 0 })
        }
        Kind::Receive { messages, .. } => {
            let messages = instead.unwrap_or(messages);
            Some(Moved { calls: 0, bytes: messages.iter().map(|m| m.bytes() as u64).sum() })
        }
        _ => None,
    };
    moved.map(|moved| (Route { op: "send", axes: vec![Axis::STAGES] }, moved)).into_iter()
}
