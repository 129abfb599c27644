//! Which values models expose, and what depends on it.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use phalanx_ir::{Model, Role};
use phalanx_models::port;
use phalanx_script::ScriptKey;

use super::Lowered;
use crate::lowered::{BLOCK, ROW};

impl Lowered {
    /// Whether a pipeline does not drain between steps: not if predictions are read after each. A loss of a stage
    /// before the last would have to wait for its backward in the next script, and so would a value that goes from
    /// reader to reader: such models take steps one by one.
    pub(crate) fn rolls(&self) -> bool {
        let last = self.model.instances().last().map(|instance| instance.segment);
        let segments = self.model.segments().iter().enumerate();
        let mut others = segments.filter(|(number, _)| Some(*number) != last);
        let early = others.any(|(_, program)| program.outputs_with(Role::Loss).next().is_some());
        let goes_on = !early && !self.hands_values_on();
        !self.rows.is_empty() && self.trains && !self.reads_predictions() && goes_on
    }

    /// Micro-batches of a script of an endless row, if steps are taken in such a row.
    pub fn row_microbatches(&self) -> Option<usize> {
        self.rows.first().map(|row| row.window.microbatches).filter(|_| self.rolls())
    }

    /// Whether several instances read the same boundary value.
    fn hands_values_on(&self) -> bool {
        let mut read = BTreeSet::new();
        let mut again = false;
        for number in 0..self.model.instances().len() {
            let program = self.model.program(number);
            for port in program.inputs_with(Role::Boundary) {
                again |= !read.insert(port.name.as_str());
            }
            for port in program.outputs_with(Role::Boundary) {
                read.remove(port.name.as_str());
            }
        }
        again
    }

    /// At least and at most how many steps are taken together; one if none are.
    pub(crate) fn together(&self) -> RangeInclusive<usize> {
        let each =
            self.rows.first().map_or(1, |row| row.window.microbatches / self.settings.microbatches);
        match (self.rolls(), self.goes_ahead()) {
            (true, _) => 2 * each..=ROW.max(2 * each),
            (false, true) => BLOCK..=BLOCK,
            (false, false) => 1..=1,
        }
    }

    /// Whether what the model exposes is read after each step.
    fn reads_predictions(&self) -> bool {
        let counts = [port::CHOSEN, port::PLACED, port::SLOT, port::ROWS];
        probes(&self.model).any(|probe| !counts.contains(&probe))
    }

    /// Whether the steps of a block go on before the norm of the step before is known. One stage group waits
    /// for no other.
    pub(crate) fn goes_ahead(&self) -> bool {
        let asked = self.settings.parallel.pipeline.post_validation;
        asked && self.is_pipeline() && self.trains && !self.reads_predictions()
    }

    /// The scripts whose model exposes a value of this name.
    pub(crate) fn exposing(&self, name: &str) -> BTreeSet<ScriptKey> {
        let own = self.forward.iter().map(|(key, own)| (*key, &own.model));
        let all = own.chain([(ScriptKey::Train, &self.model)]);
        all.filter(|(_, model)| probes(model).any(|probe| probe == name))
            .map(|(key, _)| key)
            .collect()
    }

    /// The names of the values that the model exposes when it predicts.
    pub(crate) fn exposed(&self) -> Vec<String> {
        let own = self.forward.get(&ScriptKey::Predict);
        own.iter().flat_map(|own| probes(&own.model)).map(str::to_owned).collect()
    }
}

/// The values that a model exposes.
fn probes(model: &Model) -> impl Iterator<Item = &str> {
    let segments = model.segments().iter();
    segments.flat_map(|p| p.outputs_with(Role::Probe)).map(|port| port.name.as_str())
}
