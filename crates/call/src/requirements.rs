//! What an engine needs beside the values of a program.

use phalanx_ir::{Instr, Program};

/// An engine's needs, stated before any place is found.
pub trait Requirements: Send + Sync {
    /// Bytes of scratch memory that an instruction needs on each rank while it runs.
    fn scratch(&self, program: &Program, instr: &Instr) -> usize;
}

/// What ops say themselves.
pub struct OfOps;

impl Requirements for OfOps {
    fn scratch(&self, program: &Program, instr: &Instr) -> usize {
        program.scratch_bytes(instr)
    }
}
