//! What a script moves between ranks, from its types alone, before any rank starts.

use std::collections::BTreeMap;

use phalanx_call::traffic::{MovedRows, add, of_program, rows_of_program};
use phalanx_call::{Message, Moved, Route};
use phalanx_ir::{Axis, Op};

use crate::action::{Action, Kind, Script};
use crate::schedule::ScheduledRun;
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

/// Rows that the script's rank gets from others in a turn: as many as a value of the step says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TurnRows {
    /// The instance, the part and the micro-batch.
    pub turn: ScheduledRun,
    /// The rows.
    pub rows: MovedRows,
}

/// Those of one run of a script. What [`traffic`] says of them is what there is room for.
pub fn rows(script: &Script) -> Vec<TurnRows> {
    let of_turn = |&(action, turn): &(usize, ScheduledRun)| {
        let run = script.actions[action].run();
        let entry = run.map(|run| &script.programs[run.program.0]);
        let rows = entry
            .filter(|entry| entry.ranks.len() > 1)
            .map(|entry| rows_of_program(entry.program(), entry.place(script.rank)));
        rows.into_iter().flatten().map(move |rows| TurnRows { turn, rows })
    };
    script.turns.iter().flat_map(of_turn).collect()
}

/// Bytes of experts' rows that a rank gets from others in one run of a script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowBytes {
    /// If every region gets its even share of the choices.
    pub even: u64,
    /// If every region is full.
    pub bound: u64,
}

/// Those of a script's rank; none if no rows travel.
pub fn row_bytes(script: &Script) -> Option<RowBytes> {
    let rows = rows(script);
    let bytes = |own: &TurnRows, rows: usize| {
        own.rows.bytes(&vec![rows as u64; own.rows.regions.iter().product()])
    };
    let even = |own: &TurnRows| {
        let share = even_share(script, own.turn.instance);
        share.map_or(own.rows.bound, |share| bytes(own, share).min(own.rows.bound))
    };
    let bound = rows.iter().map(|own| own.rows.bound).sum();
    (!rows.is_empty()).then(|| RowBytes { even: rows.iter().map(even).sum(), bound })
}

/// How many rows a region of an instance gets if choices are even.
fn even_share(script: &Script, instance: usize) -> Option<usize> {
    let turns = script.turns.iter().filter(|(_, turn)| turn.instance == instance);
    let runs = turns.filter_map(|(action, _)| script.actions[*action].run());
    runs.map(|run| script.programs[run.program.0].program()).find_map(|program| {
        program.instrs().iter().find_map(|instr| {
            let Op::Queue(queue) = &instr.op else { return None };
            let choices: usize = program.ty(instr.inputs[0]).shape.iter().rev().take(2).product();
            Some(choices.div_ceil(queue.parts).min(queue.room))
        })
    })
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
