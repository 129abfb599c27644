//! Whether a gradient buffer has all contributions.

use std::collections::BTreeSet;

use super::{Bad, Gradients};
use crate::action::{BufferId, Contribution};
use crate::error::ScriptError;

impl Gradients<'_> {
    /// An action that reads a gradient, for an update or for the norm, needs all of it.
    pub(super) fn ready(&self, buffer: BufferId, bad: Bad<'_>) -> Result<(), ScriptError> {
        self.is_complete(buffer, bad)?;
        self.has(buffer, self.brought_now(buffer), bad)?;
        if let Some(axis) = self.partial.get(&buffer).and_then(|p| p.iter().next()) {
            return Err(bad(
                format!("`{}` is still a partial sum over `{axis}`", self.name(buffer)),
                "reduce it before it is read",
            ));
        }
        Ok(())
    }

    /// Checks that a buffer has every contribution that this rank makes.
    pub(super) fn is_complete(&self, buffer: BufferId, bad: Bad<'_>) -> Result<(), ScriptError> {
        let each = self.complete.get(&buffer).map_or(&[][..], |(_, each)| each);
        self.has(buffer, self.now(buffer, each), bad)
    }

    /// Of what each update needs, what the next one does. After the last update, its gradient can still be read.
    fn now<'s>(
        &self,
        buffer: BufferId,
        each: &'s [BTreeSet<Contribution>],
    ) -> Option<&'s BTreeSet<Contribution>> {
        each.get(self.updates(buffer)).or(each.last())
    }

    fn has(
        &self,
        buffer: BufferId,
        needed: Option<&BTreeSet<Contribution>>,
        bad: Bad<'_>,
    ) -> Result<(), ScriptError> {
        let empty = BTreeSet::new();
        let (holds, needed) = (self.holds.get(&buffer).unwrap_or(&empty), needed.unwrap_or(&empty));
        match needed.difference(holds).next() {
            None => Ok(()),
            Some(missing) => Err(bad(
                format!(
                    "`{}` lacks the contribution of {} (it has {} of {})",
                    self.name(buffer),
                    self.script.names.describe(missing),
                    needed.intersection(holds).count(),
                    needed.len()
                ),
                "read it after every user of the parameter has added its gradient",
            )),
        }
    }

    /// What other stage groups add to the next update of a buffer.
    pub(super) fn brought_now(&self, buffer: BufferId) -> Option<&BTreeSet<Contribution>> {
        self.now(buffer, self.brought.get(&buffer)?)
    }
}
