//! What an engine needs to know before values get their slots.

use phalanx_ir::{Instr, Program};

/// The workspace memory that an engine needs besides a program's values. It is asked before slots
/// are placed, so the numbers depend on the program alone.
pub trait Requirements: Send + Sync {
    /// Bytes of scratch memory in the workspace, on each rank, that an instruction needs while it runs.
    fn scratch(&self, program: &Program, instr: &Instr) -> usize;
}

/// The requirements of an engine that needs no scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NoScratch;

impl Requirements for NoScratch {
    fn scratch(&self, _program: &Program, _instr: &Instr) -> usize {
        0
    }
}
