//! Which memory an instruction reads and writes, as its tasks do.

use phalanx_call::{Slot, Slots};
use phalanx_engine::Args;
use phalanx_ir::{Instr, Op, Phase, Program, ValueId};

use crate::folds::Folds;
use crate::tasks::Var;

/// Pieces of memory that an instruction reads and writes: slots, and how many bytes of each.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct Touched {
    reads: Vec<(Slot, usize)>,
    writes: Vec<(Slot, usize)>,
    /// Whether it is a product that nothing of a backward waits for.
    pub(super) is_deferrable: bool,
}

/// The same in a run: bytes of the arena, from the first to the one behind the last.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct TouchedBytes {
    pub(super) reads: Vec<[usize; 2]>,
    pub(super) writes: Vec<[usize; 2]>,
}

impl Touched {
    /// What an instruction touches, with what it computes of those that follow.
    pub(super) fn of(
        program: &Program,
        instr: usize,
        slots: &Slots,
        folds: &Folds,
        rank: usize,
    ) -> Self {
        let Instr { inputs, outputs, .. } = &program.instrs()[instr];
        let piece = |value: &ValueId| {
            let slot = slots.by_value[value.index()];
            (slot, Var::of(program, *value, slot, rank).bytes())
        };
        let folded: Vec<_> = outputs.iter().filter_map(|value| folds.to(*value)).collect();
        let reads = inputs.iter().copied();
        let reads =
            reads.chain(folded.iter().flat_map(|fold| fold.bias.into_iter().chain(fold.addend)));
        let writes = outputs.iter().copied();
        let writes = writes.chain(
            folded
                .iter()
                .flat_map(|fold| fold.into.into_iter().chain(fold.gelu.map(|(_, value)| value))),
        );
        let sum = folds.sum_of(&program.instrs()[instr]).map(|(_, value)| value);
        let writes: Vec<_> = writes.chain(sum).collect();
        let scratch = slots.scratch[instr].map(|offset| {
            let lives = slots.live_ranges.iter();
            let bytes = lives.filter(|life| life.birth == instr && life.offset == offset);
            (Slot::Workspace(offset), bytes.map(|life| life.bytes).max().unwrap_or(0))
        });
        let of = &program.instrs()[instr];
        Self {
            reads: reads.collect::<Vec<_>>().iter().map(piece).collect(),
            writes: writes.iter().map(piece).chain(scratch).collect(),
            is_deferrable: of.phase == Phase::W
                && matches!(of.op, Op::Matmul(_) | Op::GroupedMatmulGrad(_)),
        }
    }

    /// What the copies to outputs touch, at the end of a program.
    pub(super) fn by_copies(program: &Program, slots: &Slots, rank: usize) -> Self {
        let pieces = |to: bool| {
            let copies = slots.copies.iter();
            let piece = move |&(output, value): &(usize, ValueId)| {
                let slot = slots.by_value[value.index()];
                let bytes = Var::of(program, value, slot, rank).bytes();
                (if to { Slot::Output(output) } else { slot }, bytes)
            };
            copies.map(piece).collect()
        };
        Self { reads: pieces(false), writes: pieces(true), is_deferrable: false }
    }

    /// The bytes of a run.
    pub(super) fn bytes(&self, args: &Args<'_>) -> TouchedBytes {
        let bytes = |(slot, bytes): &(Slot, usize)| {
            let start = match slot {
                Slot::Input(i) => args.inputs[*i].offset,
                Slot::Output(o) => args.outputs[*o].span.offset,
                Slot::Workspace(offset) => args.workspace.offset + offset,
                Slot::Unused => return None,
            };
            Some([start, start + bytes])
        };
        TouchedBytes {
            reads: self.reads.iter().filter_map(bytes).collect(),
            writes: self.writes.iter().filter_map(bytes).collect(),
        }
    }
}

impl TouchedBytes {
    /// Whether one of two must end before the other begins: one writes what the other touches.
    pub(super) fn conflicts(&self, other: &TouchedBytes) -> bool {
        let meet = |a: &[[usize; 2]], b: &[[usize; 2]]| {
            a.iter().any(|x| b.iter().any(|y| x[0] < y[1] && y[0] < x[1]))
        };
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
    }
}
