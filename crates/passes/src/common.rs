//! Common subexpression elimination: of two instructions with the same op, operands and result
//! types, the second is removed and its readers read the first.
//!
//! Phases limit this. A value of a later phase must not replace one of an earlier phase, for that
//! would move work from the phase that needs it to one that runs after; so the kept instruction's
//! phase is at most the removed one's. Constants are shared only within a phase: a constant is free
//! to recompute, but would take memory between phases. Collectives of the forward are not reused in
//! the backward: what was gathered is gathered again, not kept. Recomputation creates equal
//! instructions on purpose, so this pass must run before it.

use std::collections::{HashMap, HashSet};

use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Axis, Instr, Op, OpDef, Phase, Program, Rewriter, TensorType, ValueId};

/// Merges instructions that compute the same values.
pub fn common(program: &Program) -> Program {
    merge(program, serves)
}

/// The same in a program whose phases run at once, where nothing is kept between them: there
/// collectives of the forward are reused in the backward too, but for blocks that come one after the
/// other: all of them together are what no rank should hold.
pub fn common_at_once(program: &Program) -> Program {
    let reused = |op: &Op| match op {
        Op::Collective(c) => !is_block(&c.kind),
        _ => false,
    };
    merge(program, |kept, phase| reused(&kept.op) || serves(kept, phase))
}

fn is_block(kind: &CollectiveKind) -> bool {
    use CollectiveKind::{BroadcastBlock, TakeBlock, Turn};
    matches!(kind, Turn { .. } | BroadcastBlock { .. } | TakeBlock { .. })
}

fn merge(program: &Program, serves: impl Fn(&Instr, Phase) -> bool) -> Program {
    let mut rewriter = Rewriter::new(program);
    let mut seen: HashMap<Key, Vec<usize>> = HashMap::new();
    let filled = filled(program);
    for (index, instr) in program.instrs().iter().enumerate() {
        if !may_merge(program, instr) || instr.outputs.iter().any(|v| filled.contains(v)) {
            rewriter.keep(index);
            continue;
        }
        let earlier = seen.entry(key(program, &rewriter, instr)).or_default();
        let twin =
            (earlier.iter()).map(|&i| &program.instrs()[i]).find(|twin| serves(twin, instr.phase));
        match twin {
            Some(twin) => {
                for (&value, &by) in instr.outputs.iter().zip(&twin.outputs) {
                    rewriter.replace(value, by);
                }
            }
            None => {
                earlier.push(index);
                rewriter.keep(index);
            }
        }
    }
    rewriter.finish()
}

/// What makes two instructions the same. Attributes are compared as text, which is exact: as
/// numbers, 0 and −0 would be equal.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    name: &'static str,
    axes: Vec<Axis>,
    attrs: Vec<(&'static str, String)>,
    operands: Vec<ValueId>,
    types: Vec<TensorType>,
}

fn key(program: &Program, rewriter: &Rewriter<'_>, instr: &Instr) -> Key {
    let attrs = instr.op.attrs();
    Key {
        name: instr.op.name(),
        axes: instr.op.axes().to_vec(),
        attrs: attrs.iter().map(|(k, v)| (k, v.to_owned())).collect(),
        operands: instr.inputs.iter().map(|&v| rewriter.resolve(v)).collect(),
        types: (instr.outputs.iter()).map(|&v| program.ty(v).clone()).collect(),
    }
}

/// The handle of a started collective is waited for exactly once, so starts are never merged.
fn may_merge(program: &Program, instr: &Instr) -> bool {
    (instr.outputs.iter()).all(|&v| !program.ty(v).pending)
}

/// Values that blocks are put into, each of which has memory of its own.
fn filled(program: &Program) -> HashSet<ValueId> {
    let puts = |op: &Op| match op {
        Op::Collective(c) => !matches!(c.kind, CollectiveKind::AllToAll { .. }),
        _ => false,
    };
    let collectives = program.instrs().iter().filter(|instr| puts(&instr.op));
    collectives.filter_map(|instr| instr.inputs.get(1).copied()).collect()
}

fn serves(kept: &Instr, phase: Phase) -> bool {
    match kept.op {
        // What was gathered for the forward is gathered again, not kept whole for the backward.
        Op::Collective(_) if kept.phase == Phase::F => phase == Phase::F,
        _ if kept.inputs.is_empty() => kept.phase == phase,
        _ => kept.phase <= phase,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_on, check_unchanged};

    #[test]
    fn equal_instructions_merge_and_then_their_readers_do() {
        check(
            "
            x: boundary f32[4]
            %1 = tanh(x) : f32[4]
            %2 = scale(%1, by=2) : f32[4]
            %3 = tanh(x) : f32[4]
            %4 = scale(%3, by=2) : f32[4]
            %5 = scale(%3, by=3) : f32[4]
            %6 = add(%4, %5) : f32[4]
            return a: boundary %2
            return b: boundary %6",
            common,
            "
            %1 = tanh(x) : f32[4]
            %2 = scale(%1, by=2) : f32[4]
            %5 = scale(%1, by=3) : f32[4]
            %6 = add(%2, %5) : f32[4]",
        );
    }

    #[test]
    fn a_later_phase_never_serves_an_earlier_one() {
        check(
            "
            x: boundary f32[4]
            %1 = tanh(x) : f32[4] @W
            %2 = tanh(x) : f32[4] @B
            %3 = tanh(x) : f32[4] @W
            %4 = relu(x) : f32[4]
            %5 = relu(x) : f32[4] @B
            %6 = add(%1, %3) : f32[4] @W
            %7 = add(%2, %5) : f32[4] @B
            return w: gradient %6
            return b: cotangent %7
            return f: boundary %4",
            common,
            "
            %1 = tanh(x) : f32[4] @W
            %2 = tanh(x) : f32[4] @B
            %4 = relu(x) : f32[4]
            %6 = add(%1, %1) : f32[4] @W
            %7 = add(%2, %4) : f32[4] @B",
        );
    }

    #[test]
    fn constants_are_shared_within_a_phase_only_and_zeros_keep_their_sign() {
        check(
            "
            %1 = fill(dtype=f32, shape=4, value=0) : f32[4]
            %2 = fill(dtype=f32, shape=4, value=0) : f32[4]
            %3 = fill(dtype=f32, shape=4, value=-0) : f32[4]
            %4 = fill(dtype=f32, shape=4, value=0) : f32[4] @B
            %5 = add(%1, %2) : f32[4]
            return a: boundary %5
            return b: boundary %3
            return c: cotangent %4",
            common,
            "
            %1 = fill(dtype=f32, shape=4, value=0) : f32[4]
            %3 = fill(dtype=f32, shape=4, value=-0) : f32[4]
            %4 = fill(dtype=f32, shape=4, value=0) : f32[4] @B
            %5 = add(%1, %1) : f32[4]",
        );
    }

    #[test]
    fn results_in_other_layouts_are_other_values() {
        let text = "
            x: boundary f32[8]
            %1 = broadcast(x, shape=4x8, dims=0) : f32[4,8]{0:dp}
            %2 = broadcast(x, shape=4x8, dims=0) : f32[4,8]
            return a: boundary %1
            return b: boundary %2";
        check_unchanged("dp=2", text, common);
    }

    #[test]
    fn collectives_of_the_forward_do_not_serve_the_backward() {
        let text = "
            x: boundary f32[8]{0:dp}
            %1 = all_gather<dp>(x, dim=0) : f32[8]
            %2 = tanh(%1) : f32[8]
            %3 = all_gather<dp>(x, dim=0) : f32[8] @B
            %4 = all_gather<dp>(x, dim=0) : f32[8] @W
            %5 = add(%3, %4) : f32[8] @W
            return y: boundary %2
            return g: gradient %5";
        let apart = "
            %1 = all_gather<dp>(x, dim=0) : f32[8]
            %2 = tanh(%1) : f32[8]
            %3 = all_gather<dp>(x, dim=0) : f32[8] @B
            %5 = add(%3, %3) : f32[8] @W";
        check_on("dp=2", text, common, apart);
        let at_once = "
            %1 = all_gather<dp>(x, dim=0) : f32[8]
            %2 = tanh(%1) : f32[8]
            %5 = add(%1, %1) : f32[8] @W";
        check_on("dp=2", text, common_at_once, at_once);
    }

    #[test]
    fn collectives_merge_but_running_ones_do_not() {
        let before = "
            x: boundary f32[8]{P:dp}
            %1 = all_reduce<dp>(x) : f32[8]
            %2 = all_reduce<dp>(x) : f32[8]
            %3 = add(%1, %2) : f32[8]
            return y: boundary %3";
        let after = "
            %1 = all_reduce<dp>(x) : f32[8]
            %3 = add(%1, %1) : f32[8]";
        check_on("dp=2", before, common, after);
        let running = "
            x: boundary f32[8]{P:dp}
            %1 = all_reduce_start<dp>(x) : pending f32[8]
            %2 = all_reduce_start<dp>(x) : pending f32[8]
            %3 = done(%1) : f32[8]
            %4 = done(%2) : f32[8]
            %5 = add(%3, %4) : f32[8]
            return y: boundary %5";
        check_unchanged("dp=2", running, common);
    }
}
