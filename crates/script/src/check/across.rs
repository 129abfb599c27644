//! What passes between ranks, as the checker of gradients sees it.

use phalanx_ir::Op;
use phalanx_ir::ops::{Collective, CollectiveKind};

use super::{Bad, Gradients};
use crate::action::{BufferId, Run};
use crate::error::ScriptError;

impl Gradients<'_> {
    /// Whether a buffer holds what another stage group adds, and nothing of this one.
    pub(super) fn is_brought(&self, buffer: BufferId) -> bool {
        let own = self
            .complete
            .get(&buffer)
            .is_some_and(|(_, each)| each.iter().any(|own| !own.is_empty()));
        !own && self.brought_now(buffer).is_some_and(|all| !all.is_empty())
    }

    /// A gradient is sent once this stage group's contributions are complete: as a summand, or as the sum.
    pub(super) fn sends(&mut self, buffer: BufferId, bad: Bad<'_>) -> Result<(), ScriptError> {
        if !self.complete.contains_key(&buffer) {
            return Ok(());
        }
        self.is_complete(buffer, bad)?;
        if let Some(axis) = self.partial.get(&buffer).and_then(|axes| axes.iter().next()) {
            return Err(bad(
                format!("`{}` is still a partial sum over `{axis}`", self.name(buffer)),
                "sum it within the stage group before it is sent",
            ));
        }
        self.sent.insert(buffer);
        Ok(())
    }

    /// What arrives is all that other stage groups add, with this one's own contributions if it has sent them.
    pub(super) fn arrives(&mut self, buffer: BufferId, bad: Bad<'_>) -> Result<(), ScriptError> {
        let Some(brought) = self.brought_now(buffer).cloned() else { return Ok(()) };
        let holds = self.holds.get(&buffer).is_some_and(|holds| !holds.is_empty());
        if holds && !self.sent.contains(&buffer) {
            return Err(bad(
                format!(
                    "what arrives takes the place of the contributions in `{}`",
                    self.name(buffer)
                ),
                "send them first: what comes back contains them",
            ));
        }
        self.holds.entry(buffer).or_default().extend(brought);
        Ok(())
    }

    /// Whether a sum over ranks ends on another rank alone.
    pub(super) fn is_given(&self, run: &Run) -> bool {
        let entry = &self.script.programs[run.program.0];
        let (program, place) = (entry.program(), entry.place(self.script.rank));
        program.instrs().iter().any(|instr| match &instr.op {
            Op::Collective(Collective {
                kind: CollectiveKind::ReduceBlock { block, .. },
                axes,
                ..
            }) if instr.inputs.len() == 1 => program.mesh().shard(place, axes) != *block,
            _ => false,
        })
    }
}
