//! Finds the parts of a segment that strategies annotate, by what the program does and not by
//! names.

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{Instr, Op, Program, ValueId};

/// An attention with its queries, keys and values: `[batch, sequence, heads, size]` each.
pub(super) struct Heads<'a> {
    pub(super) instr: &'a Instr,
    pub(super) kind: AttentionKind,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

impl Heads<'_> {
    pub(super) fn qkv(&self) -> [ValueId; 3] {
        [self.instr.inputs[0], self.instr.inputs[1], self.instr.inputs[2]]
    }

    pub(super) fn output(&self) -> ValueId {
        self.instr.outputs[0]
    }
}

/// Every attention of a program.
pub(super) fn attentions(program: &Program) -> Vec<Heads<'_>> {
    let heads = |v: ValueId| program.ty(v).shape[2];
    let found = program.instrs().iter().filter_map(|instr| match &instr.op {
        Op::Attention(attention) => Some((instr, attention.kind)),
        _ => None,
    });
    found
        .map(|(instr, kind)| Heads {
            instr,
            kind,
            heads: heads(instr.inputs[0]),
            kv_heads: heads(instr.inputs[1]),
        })
        .collect()
}

/// The instructions that read a value.
pub(super) fn readers(program: &Program, value: ValueId) -> impl Iterator<Item = &Instr> {
    program.instrs().iter().filter(move |i| i.inputs.contains(&value))
}

/// The heads that a value becomes in an attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Becomes {
    pub(super) heads: usize,
    /// Whether it becomes keys or values.
    pub(super) keys: bool,
}

/// The heads, if the value becomes an operand of an attention.
pub(super) fn heads_of(program: &Program, value: ValueId) -> Option<Becomes> {
    let mut seen = vec![value];
    let mut next = 0;
    while let Some(&value) = seen.get(next) {
        next += 1;
        for instr in readers(program, value) {
            match &instr.op {
                Op::Attention(_) => {
                    let keys = instr.inputs[0] != value;
                    return Some(Becomes { heads: program.ty(value).shape[2], keys });
                }
                Op::Reshape(_) | Op::Rotary(_) | Op::Binary(_) | Op::Cast(_) => {
                    seen.push(instr.outputs[0]);
                }
                _ => {}
            }
        }
    }
    None
}
