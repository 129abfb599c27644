//! What a script moves between ranks, from its types alone, before any rank starts.

use std::collections::BTreeMap;

use phalanx_call::traffic::{add, of_program};
use phalanx_call::{Moved, Route};
use phalanx_ir::Axis;

use crate::action::{Action, Kind, Script};

/// What its rank moves in one run of a script.
pub fn traffic(script: &Script) -> BTreeMap<Route, Moved> {
    let mut total = BTreeMap::new();
    for action in &script.actions {
        for (route, moved) in of_action(script, action) {
            add(&mut total, route, moved);
        }
    }
    total
}

/// What the rank of a script moves for one of its actions.
pub fn of_action(script: &Script, action: &Action) -> BTreeMap<Route, Moved> {
    let send = |moved| BTreeMap::from([(Route { op: "send", axes: vec![Axis::STAGES] }, moved)]);
    match (&action.kind, action.run()) {
        (_, Some(run)) => {
            let entry = &script.programs[run.program.0];
            of_program(entry.program(), entry.place(script.rank))
        }
        // A sender makes the calls; the receiver, who reads the sender's memory, moves the bytes.
        (Kind::Send { messages, .. }, _) => {
            let calls = messages.iter().map(|m| m.blocks.len() as u64).sum();
            send(Moved { calls, bytes: 0 })
        }
        (Kind::Receive { messages, .. }, _) => {
            send(Moved { calls: 0, bytes: messages.iter().map(|m| m.bytes() as u64).sum() })
        }
        _ => BTreeMap::new(),
    }
}
