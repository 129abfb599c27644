//! Planted bugs of rings of keys, to measure within how many cases random programs find each. They are in
//! the program and leave its types as they are, so numbers must reveal them; ranks that are threads run it.

use phalanx_ir::ops::{Attend, CollectiveKind, Scale};
use phalanx_ir::{Instr, Op, Program, Rewriter, TensorType, ValueId};

/// A planted bug of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingBug {
    /// The first step after the own block gets that one once more.
    KeysTwice,
    /// The last turn is not taken: sums of gradients stay on another rank, or a block of keys does not come.
    TurnTooFew,
    /// A step takes the keys of another rank for its own, and so for keys at its own places.
    OffsetIgnored,
    /// A step does not go on from the result and the log-sum-exp of the steps before.
    StatisticsLost,
}

impl RingBug {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::KeysTwice, Self::TurnTooFew, Self::OffsetIgnored, Self::StatisticsLost];

    /// A program that has the bug, or nothing if it has no ring.
    pub(crate) fn planted_in(self, program: &Program) -> Option<Program> {
        let instrs = program.instrs();
        let turns = |instr: &Instr| matches!(&instr.op, Op::Collective(c) if matches!(c.kind, CollectiveKind::Turn { .. }));
        let goes_on = |instr: &Instr| matches!(&instr.op, Op::Attend(a) if a.goes_on);
        let at = match self {
            Self::KeysTwice => instrs.iter().position(turns),
            Self::TurnTooFew => instrs.iter().rposition(turns),
            Self::OffsetIgnored | Self::StatisticsLost => instrs.iter().position(goes_on),
        }?;
        let mut rewriter = Rewriter::new(program);
        for (index, instr) in instrs.iter().enumerate() {
            match self {
                _ if index != at => rewriter.keep(index),
                Self::KeysTwice | Self::TurnTooFew => {
                    rewriter.emit(AS_IT_IS, &instr.inputs, &instr.outputs, instr.phase);
                }
                Self::OffsetIgnored => unturned(&mut rewriter, program, instr),
                Self::StatisticsLost => {
                    let Op::Attend(attend) = &instr.op else { return None };
                    // Queries, keys, values, and a random key behind the two that are left out.
                    let left: Vec<ValueId> = instr
                        .inputs
                        .iter()
                        .enumerate()
                        .filter(|(i, _)| !(3..5).contains(i))
                        .map(|(_, &v)| v)
                        .collect();
                    let attend = Attend { goes_on: false, ..*attend };
                    rewriter.emit(attend, &left, &instr.outputs, instr.phase);
                }
            }
        }
        Some(rewriter.finish())
    }
}

const AS_IT_IS: Scale = Scale { by: 1.0 };

/// The step with keys and values in a layout that was never turned.
fn unturned(rewriter: &mut Rewriter<'_>, program: &Program, instr: &Instr) {
    let own = |ty: &TensorType| {
        let mut layout = ty.layout.clone();
        while layout.dims()[1].turn > 0 {
            layout = layout.turned(1, program.mesh());
        }
        ty.with_layout(layout)
    };
    let mut operands: Vec<ValueId> = instr.inputs.iter().map(|&v| rewriter.resolve(v)).collect();
    for operand in &mut operands[1..3] {
        let ty = own(rewriter.ty(*operand));
        *operand = rewriter.add(AS_IT_IS, &[*operand], vec![ty], instr.phase)[0];
    }
    let types = instr.outputs.iter().map(|&v| program.ty(v).clone()).collect();
    let made = rewriter.add(instr.op.clone(), &operands, types, instr.phase);
    for (&old, new) in instr.outputs.iter().zip(made) {
        rewriter.bind(old, new);
    }
}
