//! A model that is evaluated but not trained: weights and a forward script, nothing else.

use phalanx_engine::Engine;
use phalanx_ir::{DType, Model};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{self as script, BufferId, Device, Place, Ranks, forward, forward_script};

use super::compile::compile_forward;
use super::feed::{Feed, Scalars, StepData};
use super::numbers::decode;
use super::parallel::Parallel;
use super::store::{ReadParam, Store};
use crate::error::{Error, Problem, Result};

/// A loaded model that computes losses or logits.
pub struct Forward<E: Engine> {
    executor: Executor<E>,
    script: ScriptId,
    feed: Feed,
    loss: BufferId,
}

impl<E: Engine> Forward<E> {
    /// Prepares a model whose data comes in `microbatches` parts; `read` gives its weights, which
    /// are stored as `weights`.
    pub fn new(
        engine: E,
        model: &Model,
        weights: DType,
        microbatches: usize,
        read: &ReadParam<'_>,
    ) -> Result<Self> {
        let ranks = Ranks::alone();
        let partition = Parallel::default().partition(model, ranks.mesh)?;
        let compiled = compile_forward(model, weights, &partition)?;
        let turns = forward(0..model.instances().len(), microbatches);
        let devices = [Device::alone(&compiled, &turns)];
        let at = Place::default();
        let plan = forward_script(&script::Forward { model, devices: &devices, at, weights })?;
        let mut executor = Executor::new(engine);
        let script = executor.load(plan.script)?;
        executor.reserve()?;
        let store = {
            let types = vec![None; model.params().len()];
            Store::new(script, model, types, plan.units, ranks)
        };
        for (unit, held) in plan.weights.iter().enumerate() {
            store.fill(&mut executor, unit, &[held], read)?;
        }
        let feed = Feed::new(&executor, script, model, ranks, microbatches)?;
        Ok(Self { executor, script, feed, loss: plan.loss })
    }

    /// Runs the model on a batch.
    pub fn run(&mut self, data: &StepData<'_>) -> Result<()> {
        let scalars = Scalars { lr: 0.0, step: 0, seed: 0 };
        self.feed.write(&mut self.executor, data, scalars)?;
        Ok(self.executor.run(self.script)?)
    }

    /// The mean loss of the last batch.
    pub fn loss(&mut self) -> Result<f64> {
        let bytes = self.executor.script(self.script).buffers[self.loss.0].bytes;
        read_scalar(&mut self.executor, self.script, self.loss, bytes)
    }

    /// A value that the model shows of one micro-batch, such as its logits.
    pub fn probe(&mut self, name: &str, microbatch: usize, dtype: DType) -> Result<Vec<f64>> {
        let end = format!("/{name}@mb{microbatch}");
        let buffers = &self.executor.script(self.script).buffers;
        let found = buffers.iter().position(|b| b.name.ends_with(&end));
        let Some(index) = found else {
            let message = format!("the model shows no value `{name}`");
            return Err(Error::refused(Problem::new(message)));
        };
        let mut bytes = vec![0; buffers[index].bytes];
        self.executor.read(self.script, BufferId(index), &mut bytes)?;
        Ok(decode(dtype, &bytes))
    }
}

/// A single number in the type that its bytes tell.
pub(crate) fn read_scalar<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    buffer: BufferId,
    bytes: usize,
) -> Result<f64> {
    let mut room = [0; 8];
    executor.read(script, buffer, &mut room[..bytes])?;
    let [a, b, c, d, ..] = room;
    Ok(if bytes == 8 { f64::from_le_bytes(room) } else { f32::from_le_bytes([a, b, c, d]).into() })
}
