//! Ranks that do the same.

use crate::action::{Action, Buffer, Entry, Kind, Run, Script, View};

impl Script {
    /// Whether another rank's script does the same: the same programs on the same buffers in the same
    /// order. What goes to whom may differ, and where in a whole unit a rank's part lies.
    pub fn is_like(&self, other: &Self) -> bool {
        let views = |a: &View, b: &View| a.buffer == b.buffer;
        let runs = |a: &Run, b: &Run| {
            let outputs = a.outputs.iter().zip(&b.outputs);
            a.program == b.program
                && a.inputs.len() == b.inputs.len()
                && a.outputs.len() == b.outputs.len()
                && a.inputs.iter().zip(&b.inputs).all(|(a, b)| views(a, b))
                && outputs.into_iter().all(|((a, how), (b, other))| views(a, b) && how == other)
                && a.contributes == b.contributes
        };
        let kinds = |a: &Kind, b: &Kind| match (a, b) {
            (Kind::Send { buffer: a, .. }, Kind::Send { buffer: b, .. })
            | (Kind::Receive { buffer: a, .. }, Kind::Receive { buffer: b, .. }) => a == b,
            (Kind::Release { buffer: a }, Kind::Release { buffer: b }) => a == b,
            _ => std::mem::discriminant(a) == std::mem::discriminant(b),
        };
        let actions = |a: &Action, b: &Action| {
            let run = match (a.run(), b.run()) {
                (Some(a), Some(b)) => runs(a, b),
                (a, b) => a.is_none() && b.is_none(),
            };
            run && a.lane == b.lane && a.after == b.after && kinds(&a.kind, &b.kind)
        };
        let buffers = |a: &Buffer, b: &Buffer| {
            (&a.key, a.category, a.bytes, a.source) == (&b.key, b.category, b.bytes, b.source)
        };
        let programs = |a: &Entry, b: &Entry| a.placed.hash == b.placed.hash;
        self.buffers.len() == other.buffers.len()
            && self.programs.len() == other.programs.len()
            && self.actions.len() == other.actions.len()
            && self.buffers.iter().zip(&other.buffers).all(|(a, b)| buffers(a, b))
            && self.programs.iter().zip(&other.programs).all(|(a, b)| programs(a, b))
            && self.actions.iter().zip(&other.actions).all(|(a, b)| actions(a, b))
    }
}
