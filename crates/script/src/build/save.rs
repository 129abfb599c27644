//! Saving: copies of the state to the disk, beside the next step.
//!
//! Nothing writes weights and optimizer state between the end of a step and the first update of the
//! next one. So the copies are the first actions of the next step's script, on their own lane, and
//! the update of a unit waits for the copy of that unit alone: saving takes no memory, and time only
//! where the disk is slower than a step. A replica has the same script, although another one
//! writes: the engine's store passes over what is not its own.

use phalanx_ir::DType;

use super::{Action, Buffer, Kind, Lane, Script, Source, State, Tier};
use crate::key::{BufferKey, StateKey, StateKind};

impl State {
    /// The state that a checkpoint holds: everything that a step reads and does not compute anew.
    /// Narrow weights follow from their master copies by rounding, unless they are halves of them, and all of a
    /// unit from the rank that updates it for others.
    pub fn saved(&self) -> impl Iterator<Item = (StateKey, &super::HeldRange)> {
        let units = self.buffers.iter().enumerate();
        units.flat_map(|(unit, buffers)| {
            let whole = |master: &super::HeldRange| master.dtype != DType::U16;
            let (narrow, updated) =
                (buffers.master.as_ref().is_some_and(whole), buffers.is_updated());
            let kept = buffers.all().filter(move |(kind, _)| match kind {
                StateKind::Weights => updated && !narrow,
                StateKind::Gradient | StateKind::Preview => false,
                StateKind::Older(_) | StateKind::Master | StateKind::Optimizer(_) => true,
            });
            kept.map(move |(kind, held)| (StateKey { unit, kind }, held))
        })
    }

    /// A script that copies the state to the disk, and does nothing else.
    pub fn save_script(&self) -> Script {
        let mut script = self.script();
        for (key, held) in self.saved() {
            let kept = &script.buffers[held.buffer.0];
            let (category, bytes, padding) = (kept.category, kept.bytes, kept.padding.clone());
            let into = script.buffer(Buffer {
                key: BufferKey::Saved(key),
                category,
                bytes,
                source: Source::Result,
                tier: Tier::Disk,
                padding,
            });
            script.actions.push(Action {
                label: format!("save {}", script.name(held.buffer)),
                lane: Lane::Disk,
                kind: Kind::Copy { from: held.buffer, into },
                after: vec![],
            });
        }
        script
    }
}
