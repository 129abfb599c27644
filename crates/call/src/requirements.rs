//! What an engine needs to know before values get their slots.

use phalanx_ir::{Exchange, Halo, Instr, Program, ValueId};

use crate::ALIGN;

/// The workspace memory that an engine needs besides a program's values. It is asked before slots
/// are placed, so the numbers depend on the program alone.
pub trait Requirements: Send + Sync {
    /// Bytes that a kernel needs besides operands, results and what ranks exchange inside the op.
    fn own(&self, program: &Program, instr: &Instr) -> usize;

    /// Values that are never stored, each with the later value that the instruction of the first computes
    /// instead: one reader, of the same type, turns it into the second. The second then has memory from
    /// the first instruction on.
    fn merged(&self, program: &Program) -> Vec<(ValueId, ValueId)> {
        let _ = program;
        Vec::new()
    }

    /// Values that an earlier instruction writes, by its number, than the one that computes them.
    fn early(&self, program: &Program) -> Vec<(ValueId, usize)> {
        let _ = program;
        Vec::new()
    }

    /// Bytes of the device's memory that an engine keeps outside of its arena to run a program, such as a
    /// workspace of a library. Programs share it: several need as much as the one that needs most.
    fn beside(&self, program: &Program) -> usize {
        let _ = program;
        0
    }

    /// Bytes of scratch memory in the workspace, on each rank, that an instruction needs while it runs: the
    /// kernel's own, followed by the numbers that ranks exchange inside the op.
    fn scratch(&self, program: &Program, instr: &Instr) -> usize {
        let numbers = Exchange::of(program, instr).map_or(0, |e| e.bytes(program.mesh()));
        let exchanged = numbers + Halo::scratch(program, instr, ALIGN);
        match exchanged {
            0 => self.own(program, instr),
            _ => self.exchange_offset(program, instr) + exchanged,
        }
    }

    /// Where in an instruction's scratch memory the exchanged numbers begin.
    fn exchange_offset(&self, program: &Program, instr: &Instr) -> usize {
        self.own(program, instr).next_multiple_of(ALIGN)
    }
}

/// The requirements of an engine that needs no scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NoScratch;

impl Requirements for NoScratch {
    fn own(&self, _program: &Program, _instr: &Instr) -> usize {
        0
    }

    /// Such engines exchange nothing in their workspace.
    fn scratch(&self, _program: &Program, _instr: &Instr) -> usize {
        0
    }
}
