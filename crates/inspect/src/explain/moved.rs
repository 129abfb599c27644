//! What a step moves between ranks: per instruction, per action, and in total.
//!
//! All numbers are bytes that one rank reads from others or writes to them, computed from types
//! alone.

use std::collections::BTreeMap;
use std::fmt::Write;

use phalanx_call::traffic::{names, of_instr};
use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Instr, Op, Program, text};
use phalanx_script::traffic::row_bytes;
use phalanx_script::{Moved, Route, RowBytes, Script};
use serde_json::{Value, json};

use phalanx_error::bytes;

/// A program, with what each collective moves at the end of its line.
pub(super) fn program_text(program: &Program, rank: usize) -> String {
    text::commented(program, |instr| {
        let moved = of_instr(program, instr, rank);
        let parts: Vec<String> = (moved.iter())
            .map(|(route, moved)| match &instr.op {
                // The line already has its name and its axes.
                Op::Collective(_) if counts_rows(instr) => {
                    amount(*moved).replacen("moves", "moves at most", 1)
                }
                Op::Collective(_) => amount(*moved),
                _ => line(route, *moved),
            })
            .collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    })
}

/// Whether only the rows travel that a step has.
fn counts_rows(instr: &Instr) -> bool {
    let Op::Collective(collective) = &instr.op else { return false };
    matches!(collective.kind, CollectiveKind::AllToAll { .. }) && instr.inputs.len() > 1
}

/// What rows of experts travel in a step, in a line; empty if none do.
pub(super) fn about_rows(script: &Script) -> String {
    row_bytes(script).map_or_else(String::new, |RowBytes { even, bound }| {
        format!(
            "# rows of experts that rank {} receives in a step: {} if choices are even, at most {}\n",
            script.rank,
            bytes(even),
            bytes(bound)
        )
    })
}

/// The collectives of a program, in its order.
pub(super) fn program_json(program: &Program, rank: usize) -> Vec<Value> {
    let instrs = program.instrs().iter().enumerate();
    let moved = instrs
        .flat_map(|(at, instr)| of_instr(program, instr, rank).into_iter().map(move |m| (at, m)));
    let row = |(at, (route, moved)): (usize, (Route, Moved))| {
        json!({
            "instruction": at,
            "result": text::value_name(program, program.instrs()[at].outputs[0]),
            "op": route.op,
            "axes": names(&route.axes),
            "bytes": moved.bytes,
        })
    };
    moved.map(row).collect()
}

/// What an action moves as the end of its line; empty if it moves nothing.
pub(super) fn action_text(moved: &BTreeMap<Route, Moved>) -> String {
    // Only the receiver of a message counts its bytes.
    let moves = moved.iter().filter(|(_, moved)| moved.bytes > 0);
    let parts: Vec<String> = moves.map(|(route, moved)| line(route, *moved)).collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!("  // {}", parts.join(", ")),
    }
}

/// What a step moves, as a table.
pub(super) fn table(moved: &BTreeMap<Route, Moved>, rank: usize) -> String {
    if moved.is_empty() {
        return "# communication: none\n\n".to_owned();
    }
    let total: u64 = moved.values().map(|moved| moved.bytes).sum();
    let mut text = format!("# communication of a step: {total} bytes of rank {rank}\n");
    let head = ["op", "over", "calls", "bytes", "MiB"];
    let _ = writeln!(
        text,
        "  {:<16}{:<12}{:>7}{:>16}{:>12}",
        head[0], head[1], head[2], head[3], head[4]
    );
    for (route, moved) in moved {
        let (over, mib) = (names(&route.axes).join(","), moved.bytes as f64 / (1 << 20) as f64);
        let Moved { calls, bytes } = moved;
        let _ = writeln!(text, "  {:<16}{over:<12}{calls:>7}{bytes:>16}{mib:>12.2}", route.op);
    }
    text + "\n"
}

/// The same as JSON.
pub(super) fn rows(moved: &BTreeMap<Route, Moved>) -> Vec<Value> {
    let row = |(route, moved): (&Route, &Moved)| {
        json!({
            "op": route.op, "axes": names(&route.axes), "count": moved.calls, "bytes": moved.bytes,
        })
    };
    moved.iter().map(row).collect()
}

fn line(route: &Route, moved: Moved) -> String {
    let times = if moved.calls > 1 { format!("{} × ", moved.calls) } else { String::new() };
    format!("{times}{route} {}", amount(moved))
}

fn amount(moved: Moved) -> String {
    match (format!("{} bytes", moved.bytes), bytes(moved.bytes)) {
        (exact, short) if exact == short => format!("moves {exact}"),
        (exact, short) => format!("moves {exact} ({short})"),
    }
}
