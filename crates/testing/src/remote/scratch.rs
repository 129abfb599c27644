//! Scratch memory that the device asks for besides that of its inner engine.

use std::ops::Range;
use std::sync::Arc;

use phalanx_call::{Requirements, Slots};
use phalanx_engine::EngineError;
use phalanx_ir::{Instr, Op, OpDef, Program};

/// The scratch memory of the inner engine, followed by the device's own.
#[derive(Clone)]
pub(super) struct OwnScratch {
    inner: Arc<dyn Requirements>,
    /// Whether it has its own scratch memory.
    more: bool,
}

impl OwnScratch {
    pub(super) fn beside(inner: Arc<dyn Requirements>, more: bool) -> Self {
        Self { inner, more }
    }

    /// Where the slots of a program have the device's own scratch memory. An instruction for which they
    /// have none is refused.
    pub(super) fn find(&self, program: &Program, slots: &Slots) -> Result<Vec<Own>, EngineError> {
        let mut found = Vec::new();
        for (index, instr) in program.instrs().iter().enumerate().filter(|(_, i)| self.more(i) > 0)
        {
            let bytes = self.inner.scratch(program, instr)..self.scratch(program, instr);
            let block = slots.scratch[index].and_then(|offset| {
                slots.live_ranges.iter().position(|life| {
                    (life.offset, life.birth, life.death) == (offset, index, index)
                        && life.bytes == bytes.end
                })
            });
            let block = block.ok_or_else(|| EngineError::Unsupported {
                engine: "remote",
                program: program.name.clone(),
                op: instr.op.name().to_owned(),
                why: "its scratch memory was not planned; place slots for its requirements"
                    .to_owned(),
            })?;
            found.push(Own { block, bytes });
        }
        Ok(found)
    }

    /// Products need a workspace on many devices; a norm's gradient shows that one scratch memory can
    /// be both sides'.
    fn more(&self, instr: &Instr) -> usize {
        match instr.op {
            Op::Matmul(_) if self.more => 192,
            Op::RmsNormGrad(_) | Op::LayerNormGrad(_) if self.more => 72,
            _ => 0,
        }
    }
}

impl Requirements for OwnScratch {
    fn own(&self, program: &Program, instr: &Instr) -> usize {
        self.inner.own(program, instr)
    }

    /// The device's own part comes last.
    fn scratch(&self, program: &Program, instr: &Instr) -> usize {
        self.inner.scratch(program, instr) + self.more(instr)
    }
}

/// The device's own part of a block of the workspace.
#[derive(Clone)]
pub(super) struct Own {
    /// The block's number in the slots.
    pub(super) block: usize,
    pub(super) bytes: Range<usize>,
}

/// Fails if something else wrote to the device's own scratch memory, as a run with a fill pattern
/// shows.
pub(super) fn untouched(own: &[Own], written: &[Vec<bool>]) -> Result<(), EngineError> {
    match own.iter().find(|own| written[own.block][own.bytes.clone()].contains(&true)) {
        None => Ok(()),
        Some(own) => Err(EngineError::Failed {
            program: "device".to_owned(),
            why: format!("something else wrote into its scratch memory, block {}", own.block),
        }),
    }
}
