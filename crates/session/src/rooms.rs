//! How much room ranks have for rows of experts, where it is bounded: known before a run from the types alone.

use phalanx_error::{Result, bytes};
use phalanx_ir::{Op, Program, ValueId};
use phalanx_script::{PlannedScript, ScriptKey};

use super::planner::Planner;

/// Rows of experts that a rank gets in a layer and micro-batch, on the rank and in the layer where they are most.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rooms {
    /// So many, if choices are even.
    pub even: usize,
    /// The bounds of a step in the order in which they are tried; the last one is what the worst choices need.
    pub bounds: Vec<Bound>,
}

/// One of the bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bound {
    /// For so many rows there is room.
    pub rows: usize,
    /// Bytes of a step on the largest rank.
    pub arena: usize,
}

impl Rooms {
    /// From the scripts of a session; none if it has room for the worst choices from the start.
    pub(crate) fn of(planner: &Planner<'_>) -> Result<Option<Self>> {
        let larger = planner.keys().into_iter().filter(|key| matches!(key, ScriptKey::Roomier(_)));
        let larger: Vec<ScriptKey> = larger.collect();
        if larger.is_empty() {
            return Ok(None);
        }
        let (mut even, mut bounds) = (0, Vec::new());
        for key in [ScriptKey::Train].into_iter().chain(larger) {
            let mut bound = Bound { rows: 0, arena: 0 };
            let all = planner.classes()?.iter().flat_map(|class| class.plan.scripts());
            for (_, planned) in all.filter(|(own, _)| *own == key) {
                bound.arena = bound.arena.max(planned.memory.arena);
                for [share, rows] in rows(planned) {
                    even = even.max(share);
                    bound.rows = bound.rows.max(rows);
                }
            }
            bounds.push(bound);
        }
        Ok(Some(Self { even, bounds }))
    }

    /// A bound as a multiple of the even share.
    pub fn slack(&self, bound: usize) -> f64 {
        let rows = self.bounds.get(bound).map_or(0, |bound| bound.rows);
        rows as f64 / self.even.max(1) as f64
    }

    /// In words, for people.
    pub fn describe(&self) -> String {
        let bound = |at: usize| {
            let Bound { rows, arena } = self.bounds[at];
            format!("{rows} ({:.2} times as many, {})", self.slack(at), bytes(arena as u64))
        };
        let last = self.bounds.len() - 1;
        let between: Vec<String> = (1..last).map(|at| format!(", then {}", bound(at))).collect();
        format!(
            "{} rows of experts if choices are even; room for {}{}, at worst {}",
            self.even,
            bound(0),
            between.concat(),
            bound(last)
        )
    }
}

/// For each product of packed rows in a script, or each dispatch where rows have places: how many rows there are if choices
/// are even, and for how many there is room.
fn rows(planned: &PlannedScript) -> impl Iterator<Item = [usize; 2]> + '_ {
    planned.script.programs.iter().flat_map(|entry| of_program(entry.program()))
}

fn of_program(program: &Program) -> Vec<[usize; 2]> {
    let is_product = |op: &Op| matches!(op, Op::GroupedMatmul(_));
    let packed = program.instrs().iter().any(|instr| is_product(&instr.op));
    let (mut found, mut of) = (Vec::new(), None);
    for instr in program.instrs() {
        match &instr.op {
            Op::Queue(queue) => {
                let choices: usize =
                    program.ty(instr.inputs[0]).shape.iter().rev().take(2).product();
                of = Some((choices.div_ceil(queue.parts.max(1)), queue.room.max(1)));
            }
            op => {
                // What experts read: the rows of products, or those that a dispatch gave places.
                let read = match op {
                    Op::Dispatch(_) if !packed => Some(instr.outputs[0]),
                    op if is_product(op) => Some(instr.inputs[0]),
                    _ => None,
                };
                let rows = read.map(|value| rows_of(program, value)).zip(of);
                found.extend(rows.map(|(rows, (even, room))| [rows / room * even, rows]));
            }
        }
    }
    found
}

/// Rows of a value that a rank holds.
fn rows_of(program: &Program, value: ValueId) -> usize {
    let shape = program.ty(value).local_shape(program.mesh());
    shape[..shape.len() - 1].iter().product()
}
