//! What a rank tells of a step: its numbers, those that it keeps from step to step, and whole tensors of a
//! rank that is alone.

use std::collections::BTreeMap;

use phalanx_engine::Engine;
use phalanx_error::{Error, Problem, Result};
use phalanx_ir::Param;
use phalanx_models::hf;
use phalanx_runtime::ScriptId;
use phalanx_script::{BufferKey, Number, Scalar, StateKind};

use super::RankWorker;
use crate::forward::{read_number, read_scalar, read_scalar_of};
use crate::store::assemble;
use crate::{StateRange, StepResult, StepRoom, StepScale};

impl<E: Engine> RankWorker<E> {
    /// The numbers of a step that a script was just run for, counted from 0 in the script.
    pub(super) fn result(
        &mut self,
        train: ScriptId,
        index: usize,
        step: u64,
    ) -> Result<StepResult> {
        let bytes = self.settings.precision.state.size();
        let several = self.executor.script(train).updates.is_some();
        let key = |number| match several {
            true => BufferKey::NumberOf { number, index },
            false => BufferKey::Number(number),
        };
        let mut read = |number| read_scalar_of(&mut self.executor, train, &key(number), bytes);
        let (loss, grad_norm) = (read(Number::Loss)?, read(Number::GradNorm)?);
        let scaling = self.settings.scaling.map(|_| self.scaled(train, step)).transpose()?;
        Ok(StepResult { loss, grad_norm, scaling, repeated: false, room: StepRoom::default() })
    }

    /// How the loss of the step that was just run was scaled.
    fn scaled(&mut self, train: ScriptId, step: u64) -> Result<StepScale> {
        let bytes = self.settings.precision.state.size();
        let mut read = |number| read_scalar(&mut self.executor, train, number, bytes);
        let (go, loss_scale) = (read(Number::Go)?, read(Number::LossScale)?);
        let skipped = step.saturating_sub(self.scalar(&Scalar::Applied)? as u64);
        Ok(StepScale { loss_scale, overflowed: go == 0.0, skipped })
    }

    /// A number that is kept from step to step.
    fn scalar(&mut self, scalar: &Scalar) -> Result<f64> {
        let kept = self.state.scalars.iter().find(|kept| kept.scalar == *scalar);
        let (buffer, dtype) = kept.map(|kept| (kept.buffer, kept.dtype)).ok_or_else(|| {
            let what = format!("the session keeps no scalar `{}`", scalar.name());
            Error::refused(Problem::new(what))
        })?;
        let script = self.any();
        read_number(&mut self.executor, script, buffer, dtype.size())
    }

    /// All numbers that are kept from step to step, by name.
    pub(super) fn scalars(&mut self) -> Result<Vec<(String, f64)>> {
        let kept: Vec<Scalar> = self.state.scalars.iter().map(|k| k.scalar.clone()).collect();
        let own = |scalar: Scalar| Ok((scalar.name().to_owned(), self.scalar(&scalar)?));
        kept.into_iter().map(own).collect()
    }

    /// The parameters of a rank that is alone, by name and in full precision: master weights if
    /// there are any.
    pub fn params(&mut self) -> Result<BTreeMap<String, hf::WeightTensor>> {
        self.tensors(self.settings.precision.full_kind())
    }

    /// The gradients of the last step of a rank that is alone, by parameter name, before clipping.
    pub fn gradients(&mut self) -> Result<BTreeMap<String, hf::WeightTensor>> {
        self.tensors(StateKind::Gradient)
    }

    fn tensors(&mut self, kind: StateKind) -> Result<BTreeMap<String, hf::WeightTensor>> {
        let mut all = BTreeMap::new();
        for param in 0..self.store.params().len() {
            let Param { name, shape, .. } = self.store.params()[param].clone();
            let elements = 0..shape.iter().product();
            let range = StateRange { param, kind, elements };
            let pieces = self.read(&range)?.into_iter();
            let (dtype, bytes) = assemble(&name, &range.elements, pieces)?;
            all.insert(name, hf::WeightTensor::from_bytes(shape, dtype, &bytes));
        }
        Ok(all)
    }
}
