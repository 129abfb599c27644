//! A model that is evaluated but not trained: weights and a forward script, nothing else.

use phalanx_engine::Engine;
use phalanx_ir::{DType, Model};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{BufferKey, Number, Source, Value};

use super::backend::Backend;
use super::command::{Command, LocalRanks, Reply};
use super::feed::StepData;
use super::lowered::Lowered;
use super::numbers::decode;
use super::planner::Planner;
use super::store::ReadParam;
use phalanx_error::{Error, Problem, Result};

/// A loaded model that computes losses or logits.
pub struct Forward {
    ranks: Box<dyn LocalRanks>,
    loss: f64,
}

impl Forward {
    /// Prepares a model whose data comes in `microbatches` parts; `read` gives its weights, which
    /// are stored as `weights`.
    pub fn new(
        backend: &dyn Backend,
        threads: usize,
        model: &Model,
        weights: DType,
        microbatches: usize,
        read: &ReadParam<'_>,
    ) -> Result<Self> {
        let requirements = backend.requirements();
        let lowered = Lowered::forward(model, weights, microbatches, threads, requirements)?;
        let mut ranks = backend.launch(&Planner::new(&lowered)?)?;
        ranks.ask(Command::Start(read))?;
        Ok(Self { ranks, loss: 0.0 })
    }

    /// Runs the model on a batch.
    pub fn run(&mut self, data: &StepData<'_>) -> Result<()> {
        for answer in self.ranks.ask(Command::Evaluate(data))? {
            if let Reply::Loss(loss) = answer {
                self.loss = loss;
            }
        }
        Ok(())
    }

    /// The mean loss of the last batch.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// A value that the model exposes for one micro-batch, such as its logits.
    pub fn probe(&mut self, port: &str, microbatch: usize, dtype: DType) -> Result<Vec<f64>> {
        let answers = self.ranks.ask(Command::Show { port, microbatch })?;
        let shown = answers.into_iter().find_map(|answer| match answer {
            Reply::Shown(bytes) => bytes,
            _ => None,
        });
        let missing =
            || Error::refused(Problem::new(format!("the model does not expose a value `{port}`")));
        Ok(decode(dtype, &shown.ok_or_else(missing)?))
    }
}

/// The bytes of a value that a script exposes for a micro-batch, if there is one.
pub(super) fn shown<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    port: &str,
    microbatch: usize,
) -> Result<Option<Vec<u8>>> {
    let wanted = |key: &BufferKey| {
        matches!(key, BufferKey::Value(Value { port: own, microbatch: part, .. })
            if **own == *port && *part == microbatch)
    };
    let buffers = &executor.script(script).buffers;
    let found = buffers.iter().position(|b| b.source == Source::Result && wanted(&b.key));
    let Some(index) = found else { return Ok(None) };
    let mut bytes = vec![0; buffers[index].bytes];
    executor.read(script, phalanx_script::BufferId(index), &mut bytes)?;
    Ok(Some(bytes))
}

/// A scalar of a step; the number of bytes gives its type.
pub(super) fn read_scalar<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    number: Number,
    bytes: usize,
) -> Result<f64> {
    let buffer = executor.script(script).find(&BufferKey::Number(number));
    let buffer = buffer.expect("a script forms the numbers that are read of it");
    let mut room = [0; 8];
    executor.read(script, buffer, &mut room[..bytes])?;
    let [a, b, c, d, ..] = room;
    Ok(if bytes == 8 { f64::from_ne_bytes(room) } else { f32::from_ne_bytes([a, b, c, d]).into() })
}
