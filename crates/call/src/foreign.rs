//! How much memory communication takes inside a program: operands that other ranks sent.
//!
//! A gathered operand is there whole, from the call that gathers it to the last instruction that reads it. One that comes
//! block by block, or that is passed around a ring, is there a block or two at a time. Both lie in the workspace.

use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Op, Program, TensorType, ValueId};

/// Bytes of operands that other ranks sent (gathered, a block of one rank, passed on) and that a rank has at the same time, at
/// most; a started transfer has its place from its start on. Only those of types that count. Sums over ranks are no
/// operands: they lie where a rank keeps its own.
pub fn foreign_at_once(program: &Program, counts: impl Fn(&TensorType) -> bool) -> usize {
    let mut spans: Vec<(usize, usize, usize)> = Vec::new();
    let last_uses = program.last_uses();
    for (index, instr) in program.instrs().iter().enumerate() {
        let Op::Collective(collective) = &instr.op else { continue };
        let (value, ty) = (instr.outputs[0], program.ty(instr.outputs[0]));
        if !is_sent(&collective.kind) || !counts(ty) {
            continue;
        }
        // A started one is there until the last use of what its end gives.
        let done = |v: ValueId| {
            let ends = program.instrs().iter().find(|i| collective.start && i.inputs.contains(&v));
            ends.map_or(v, |i| i.outputs[0])
        };
        let end = last_uses[done(value).index()].unwrap_or(index);
        spans.push((index, end, ty.local_bytes(program.mesh())));
    }
    let live = |at: usize| {
        let here = spans.iter().filter(|(start, end, _)| (*start..=*end).contains(&at));
        here.map(|span| span.2).sum::<usize>()
    };
    (0..program.instrs().len()).map(live).max().unwrap_or(0)
}

fn is_sent(kind: &CollectiveKind) -> bool {
    matches!(
        kind,
        CollectiveKind::AllGather { .. }
            | CollectiveKind::BroadcastBlock { .. }
            | CollectiveKind::Turn { .. }
    )
}
