//! The checker of commits: where a script begins with the update of the step before, that update is multiplied by what
//! follows from the sums of that step, and not by what its preview took for granted.
//!
//! A number follows from those sums if a run made it that read them, or another number that does.

use std::collections::{BTreeMap, BTreeSet};

use crate::action::{Action, BufferId, Kind, Script};
use crate::error::ScriptError;
use crate::key::{BufferKey, Number};

/// Which numbers follow from the sums of the step before, action by action.
pub(crate) struct Commits<'a> {
    script: &'a Script,
    /// Gradients that the script before has left, and whether their update is over.
    left: BTreeMap<BufferId, bool>,
    follows: BTreeSet<BufferId>,
}

impl<'a> Commits<'a> {
    pub(crate) fn new(script: &'a Script) -> Self {
        let left = script.accumulators.iter().filter(|own| own.left);
        let sums = script.find(&BufferKey::NumberOf { number: Number::Sums, index: 0 });
        Self {
            script,
            left: left.map(|own| (own.buffer, false)).collect(),
            follows: sums.into_iter().collect(),
        }
    }

    pub(crate) fn apply(&mut self, index: usize, action: &Action) -> Result<(), ScriptError> {
        let Some(run) = action.run().filter(|_| !self.left.is_empty()) else { return Ok(()) };
        let follows = run.inputs.iter().any(|view| self.follows.contains(&view.buffer));
        if let Kind::Update { gradient, .. } = &action.kind {
            let Some(over) = self.left.get_mut(gradient).filter(|over| !**over) else {
                return Ok(());
            };
            *over = true;
            return match follows {
                true => Ok(()),
                false => Err(ScriptError::Gradient {
                    action: index,
                    what: action.label.clone(),
                    why: format!(
                        "it commits `{}` with a coefficient that does not follow from the sums of its step",
                        self.script.name(*gradient)
                    ),
                    help: "bind the coefficient that was found from them, not the previewed one"
                        .to_owned(),
                }),
            };
        }
        for (view, _) in &run.outputs {
            match follows {
                true => self.follows.insert(view.buffer),
                false => self.follows.remove(&view.buffer),
            };
        }
        Ok(())
    }
}
