//! Weights and state that are written from outside.

use std::ops::Range;

use phalanx_error::{Error, Problem, Result};
use phalanx_ir::{DType, halves};
use phalanx_models::hf;
use phalanx_script::StateKind;

use crate::Session;
use crate::command::{Command, StateRange};

impl Session {
    /// Writes some values of a state, in its element type; each rank takes its part. Values that no
    /// rank holds are refused. If there are master weights, write them too: an update computes
    /// weights from masters.
    pub fn write(
        &mut self,
        param: usize,
        kind: StateKind,
        elements: Range<usize>,
        bytes: &[u8],
    ) -> Result<()> {
        // Reading them first makes sure that every value is held, and gives their type.
        let (dtype, held) = self.read(param, kind, elements.clone())?;
        if held.len() != bytes.len() {
            return Err(Error::refused(Problem::new(format!(
                "{} bytes for {} values of `{}`, which are {} in {dtype}",
                bytes.len(),
                elements.len(),
                self.known.params[param].name,
                held.len()
            ))));
        }
        let range = StateRange { param, kind, elements };
        self.ranks.ask(Command::Write(&range, bytes))?;
        Ok(())
    }

    /// Writes one parameter, by its index: its weights, all versions of them, and its master copy if there is one.
    /// Refuses any other number of values than it has.
    pub fn set_param(&mut self, param: usize, values: &hf::WeightTensor) -> Result<()> {
        let all = 0..self.known.params[param].elements();
        let masters = self.known.settings.precision.has_masters();
        let older = (1..=self.known.older[param]).map(StateKind::Older);
        let masters = masters.then_some(StateKind::Master);
        for kind in older.chain([StateKind::Weights]).chain(masters) {
            let (dtype, _) = self.read(param, kind, 0..all.len().min(1))?;
            // Weights that are halves of masters are rounded as those are split.
            let half = self.known.settings.precision.split && dtype == DType::Bf16;
            let wide = if half { DType::F32 } else { dtype };
            let bytes = values.to_bytes(all.clone(), wide).filter(|_| values.len() == all.len());
            let bytes = bytes.map(|full| if half { halves::split_bytes(&full).0 } else { full });
            let Some(bytes) = bytes else {
                let (name, found) = (&self.known.params[param].name, values.len());
                let what = format!("{found} values for `{name}`, which has {}", all.len());
                return Err(Error::refused(Problem::new(what)));
            };
            self.write(param, kind, all.clone(), &bytes)?;
        }
        Ok(())
    }
}
