//! Finds the parts of a segment that strategies annotate, by what the program does and not by
//! names.

use phalanx_ir::ops::Attention;
use phalanx_ir::{Instr, Op, Program, ValueId};

/// An attention with its queries, keys and values: `[batch, sequence, heads, size]` each.
pub(super) struct Heads<'a> {
    pub(super) instr: &'a Instr,
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
    let attention = |instr: &&Instr| matches!(instr.op, Op::Attention(Attention { .. }));
    let heads = |v: ValueId| program.ty(v).shape[2];
    (program.instrs().iter().filter(attention))
        .map(|instr| Heads {
            instr,
            heads: heads(instr.inputs[0]),
            kv_heads: heads(instr.inputs[1]),
        })
        .collect()
}

/// The instructions that read a value.
pub(super) fn readers(program: &Program, value: ValueId) -> impl Iterator<Item = &Instr> {
    program.instrs().iter().filter(move |i| i.inputs.contains(&value))
}
