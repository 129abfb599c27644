//! Scratch memory that the device asks for beside that of its inner engine.

use std::ops::Range;
use std::sync::Arc;

use phalanx_call::{NoScratch, Requirements, Slots};
use phalanx_engine::EngineError;
use phalanx_ir::{Instr, Op, OpDef, Program};

/// What the inner engine needs, and behind it the device's own.
pub(super) struct OwnScratch(Arc<dyn Requirements>);

impl Default for OwnScratch {
    fn default() -> Self {
        Self(Arc::new(NoScratch))
    }
}

impl OwnScratch {
    pub(super) fn beside(inner: Arc<dyn Requirements>) -> Self {
        Self(inner)
    }
}

impl Requirements for OwnScratch {
    fn scratch(&self, program: &Program, instr: &Instr) -> usize {
        self.0.scratch(program, instr) + own(instr)
    }
}

/// Products need a workspace on many devices; a norm's gradient shows that one scratch memory can be
/// both sides'.
fn own(instr: &Instr) -> usize {
    match instr.op {
        Op::Matmul(_) => 192,
        Op::RmsNormGrad(_) | Op::LayerNormGrad(_) => 72,
        _ => 0,
    }
}

/// The device's own part of a block of the workspace.
#[derive(Clone)]
pub(super) struct Own {
    /// The block's number in the slots.
    pub(super) block: usize,
    pub(super) bytes: Range<usize>,
}

/// Where the slots of a program have the device's own scratch memory. An instruction for which they
/// have none is refused.
pub(super) fn find(
    program: &Program,
    slots: &Slots,
    inner: &dyn Requirements,
) -> Result<Vec<Own>, EngineError> {
    let mut found = Vec::new();
    for (index, instr) in program.instrs().iter().enumerate().filter(|(_, i)| own(i) > 0) {
        let first = inner.scratch(program, instr);
        let bytes = first..first + own(instr);
        let block = slots.scratch[index].and_then(|offset| {
            slots.lives.iter().position(|life| {
                (life.offset, life.birth, life.death) == (offset, index, index)
                    && life.bytes == bytes.end
            })
        });
        let block = block.ok_or_else(|| EngineError::Unsupported {
            engine: "device",
            program: program.name.clone(),
            op: instr.op.name().to_owned(),
            why: "its scratch memory was not planned; place slots for its requirements".to_owned(),
        })?;
        found.push(Own { block, bytes });
    }
    Ok(found)
}

/// Fails if somebody wrote where the device alone may, as the blocks tell after a run in which all of
/// them were filled with a pattern.
pub(super) fn untouched(own: &[Own], written: &[Vec<bool>]) -> Result<(), EngineError> {
    match own.iter().find(|own| written[own.block][own.bytes.clone()].contains(&true)) {
        None => Ok(()),
        Some(own) => Err(EngineError::Failed {
            program: "device".to_owned(),
            why: format!("somebody wrote into its scratch memory, block {}", own.block),
        }),
    }
}
