//! Whether the scripts of two ranks are the same, apart from their messages.

use crate::action::{Action, Buffer, Entry, Kind, Run, Script, View};

impl Script {
    /// Whether another rank's script does the same: the same programs on the same buffers in the
    /// same order. Messages may differ, and so may the place of a rank's part in a whole unit.
    pub fn same_except_messages(&self, other: &Self) -> bool {
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
            (Kind::Copy { from: a, into: x }, Kind::Copy { from: b, into: y }) => (a, x) == (b, y),
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
            let what = |b: &Buffer| (b.category, b.bytes, b.source, b.tier);
            a.key == b.key && what(a) == what(b)
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

#[cfg(test)]
mod tests {
    use phalanx_call::{Lane, Tier};

    use super::*;
    use crate::action::{BufferId, Category, Source};
    use crate::key::BufferKey;

    /// A script that copies one of three buffers to another.
    fn copies(from: usize, into: usize, last: Tier) -> Script {
        let mut script = Script::of_rank(0, [0].into());
        for (name, tier) in ["a", "b", "c"].into_iter().zip([Tier::Device, Tier::Device, last]) {
            let (key, category) = (BufferKey::Own(name.into()), Category::Inputs);
            let source = Source::State;
            script.buffer(Buffer { key, category, bytes: 4, source, tier, padding: vec![] });
        }
        let kind = Kind::Copy { from: BufferId(from), into: BufferId(into) };
        let (label, lane) = ("copy".to_owned(), Lane::Down);
        script.actions.push(Action { label, lane, kind, after: vec![] });
        script
    }

    #[test]
    fn who_copies_something_else_is_not_alike() {
        let script = copies(0, 2, Tier::Host);
        assert!(script.same_except_messages(&copies(0, 2, Tier::Host)));
        assert!(!script.same_except_messages(&copies(1, 2, Tier::Host)));
        assert!(!script.same_except_messages(&copies(0, 1, Tier::Host)));
        assert!(!script.same_except_messages(&copies(0, 2, Tier::Device)));
    }
}
