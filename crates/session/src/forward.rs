//! A model that is evaluated but not trained: weights and a forward script, nothing else.

use phalanx_config::CpuUnits;
use phalanx_engine::Engine;
use phalanx_ir::{DType, Mesh, Model};
use phalanx_models::hf::WeightTensor;
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{BufferId, BufferKey, Number, ScriptKey, Source, Value};

use super::backend::Backend;
use super::command::{Command, Exposed, LocalRanks, Reply, StatePiece};
use super::feed::StepData;
use super::lowered::Lowered;
use super::planner::Planner;
use super::restore::NewRun;
use super::store::{ReadParam, assemble};
use phalanx_error::{Error, Problem, Result};

/// A loaded model that computes losses or logits.
pub struct Forward {
    ranks: Box<dyn LocalRanks>,
    loss: f64,
}

impl Forward {
    /// Prepares a model whose data comes in `microbatches` parts; `read` gives its weights, which
    /// are stored as `weights`. It computes on so many threads, with these units of their cores.
    pub fn new(
        backend: &dyn Backend,
        (threads, units): (usize, CpuUnits),
        model: &Model,
        weights: DType,
        microbatches: usize,
        read: &ReadParam<'_>,
    ) -> Result<Self> {
        let requirements = backend.requirements(units);
        let lowered =
            Lowered::forward(model, weights, microbatches, (threads, units), requirements)?;
        let mut ranks = backend.launch(&Planner::new(&lowered)?)?;
        ranks.ask(Command::Start(&NewRun(read), 0))?;
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
    pub fn probe(&mut self, port: &str, microbatch: usize) -> Result<Vec<f64>> {
        let key = ScriptKey::Evaluate;
        let answers = self.ranks.ask(Command::Show { key, port, instance: None, microbatch })?;
        Ok(gathered(port, answers)?.to_f64())
    }
}

/// A value that a model exposes, put together from what ranks hold of it.
pub(super) fn gathered(port: &str, answers: Vec<Reply>) -> Result<WeightTensor> {
    let (shape, dtype, bytes) = gathered_bytes(port, answers)?;
    if !dtype.is_float() {
        let problem = Problem::new(format!("the model exposes `{port}` as {dtype}"));
        return Err(Error::refused(problem.fix("expose a float: cast it first")));
    }
    Ok(WeightTensor::from_bytes(shape, dtype, &bytes))
}

/// The same of any element type: its shape, its type and its bytes.
pub(super) fn gathered_bytes(
    port: &str,
    answers: Vec<Reply>,
) -> Result<(Vec<usize>, DType, Vec<u8>)> {
    let (mut shape, mut all) = (None, Vec::new());
    for answer in answers {
        if let Reply::Shown(Some(shown)) = answer {
            shape = Some(shown.shape);
            all.extend(shown.pieces);
        }
    }
    let missing =
        || Error::refused(Problem::new(format!("the model does not expose a value `{port}`")));
    let shape: Vec<usize> = shape.ok_or_else(missing)?;
    let (dtype, bytes) = assemble(port, &(0..shape.iter().product()), all.into_iter())?;
    Ok((shape, dtype, bytes))
}

/// What a rank holds of a value that a script exposes for a micro-batch, if there is one.
pub(super) fn shown<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    (mesh, rank): (&Mesh, usize),
    (port, of, microbatch): (&str, Option<usize>, usize),
) -> Result<Option<Exposed>> {
    let wanted = |key: &BufferKey| {
        matches!(key, BufferKey::Value(Value { port: own, instance, microbatch: part, .. })
            if **own == *port && of.is_none_or(|of| of == *instance) && *part == microbatch)
    };
    let buffers = &executor.script(script).buffers;
    let found = buffers.iter().position(|b| b.source == Source::Result && wanted(&b.key));
    let Some(index) = found else { return Ok(None) };
    let buffer = BufferId(index);
    let mut bytes = vec![0; buffers[index].bytes];
    let ty = executor.script(script).written_type(buffer);
    let ty = ty.expect("an exposed value is written by some run").clone();
    executor.read(script, buffer, &mut bytes)?;
    let (dtype, size) = (ty.dtype, ty.dtype.size());
    let runs = ty.local_runs(mesh, rank).into_iter();
    let pieces = runs.map(|run| {
        let own = &bytes[run.local * size..][..run.len * size];
        StatePiece { first: run.global, dtype, bytes: own.to_vec() }
    });
    Ok(Some(Exposed { shape: ty.shape.to_vec(), pieces: pieces.collect() }))
}

/// A scalar of a step; the number of bytes gives its type.
pub(super) fn read_scalar<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    number: Number,
    bytes: usize,
) -> Result<f64> {
    read_scalar_of(executor, script, &BufferKey::Number(number), bytes)
}

/// The same by its key.
pub(super) fn read_scalar_of<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    key: &BufferKey,
    bytes: usize,
) -> Result<f64> {
    let buffer = executor.script(script).find(key);
    let buffer = buffer.expect("a script forms the numbers that are read of it");
    read_number(executor, script, buffer, bytes)
}

/// The number in a buffer of 4 or 8 bytes.
pub(super) fn read_number<E: Engine>(
    executor: &mut Executor<E>,
    script: ScriptId,
    buffer: BufferId,
    bytes: usize,
) -> Result<f64> {
    let mut room = [0; 8];
    executor.read(script, buffer, &mut room[..bytes])?;
    let [a, b, c, d, ..] = room;
    Ok(if bytes == 8 { f64::from_ne_bytes(room) } else { f32::from_ne_bytes([a, b, c, d]).into() })
}
