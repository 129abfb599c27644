//! What the host provides for a step: its batch, and the scalars that its programs read.

use std::sync::Arc;

use phalanx_engine::Engine;
use phalanx_ir::{DType, ElementRun, Model, Role, TensorType};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{BufferId, BufferKey, RankOnMesh, Scalar, Updates};

use super::numbers::encode;
use super::replicas::BatchShare;
use phalanx_error::{Error, Problem, Result};

/// One step's data: for each data port of the model, the rows of all micro-batches.
#[derive(Clone, Copy, Debug)]
pub struct StepData<'a> {
    /// The name of each data port, and its values, row after row.
    pub fields: &'a [(&'a str, Field<'a>)],
    /// What the loss is averaged over: valid targets of a language model, elements of a regression.
    pub count: u64,
    /// The global index of the first row's sample, which random masks depend on.
    pub first_sample: u64,
    /// The model's own scalars, by the names of its scalar ports.
    pub scalars: &'a [(&'a str, f64)],
}

/// The values of one data port.
#[derive(Clone, Copy, Debug)]
pub enum Field<'a> {
    /// Token ids and targets.
    I32(&'a [i32]),
    /// Features.
    F32(&'a [f32]),
}

impl Field<'_> {
    fn dtype(&self) -> DType {
        match self {
            Field::I32(_) => DType::I32,
            Field::F32(_) => DType::F32,
        }
    }

    fn len(&self) -> usize {
        match self {
            Field::I32(values) => values.len(),
            Field::F32(values) => values.len(),
        }
    }

    /// The bytes of part `part` of `parts` equal parts that a rank holds: these runs of elements,
    /// then padding up to `size` bytes.
    fn bytes(
        &self,
        part: usize,
        parts: usize,
        runs: &[ElementRun],
        size: usize,
        out: &mut Vec<u8>,
    ) {
        let first = self.len() / parts * part;
        out.clear();
        out.resize(size, 0);
        for run in runs {
            let from = first + run.global;
            let into = &mut out[run.local * 4..(run.local + run.len) * 4];
            let into = into.chunks_exact_mut(4);
            match self {
                Field::I32(values) => {
                    let own = &values[from..from + run.len];
                    into.zip(own).for_each(|(out, v)| out.copy_from_slice(&v.to_ne_bytes()));
                }
                Field::F32(values) => {
                    let own = &values[from..from + run.len];
                    into.zip(own).for_each(|(out, v)| out.copy_from_slice(&v.to_ne_bytes()));
                }
            }
        }
    }
}

/// A step's data with its own copy of all values.
#[derive(Clone, Debug)]
pub struct OwnedStep {
    fields: Vec<(String, OwnedField)>,
    count: u64,
    first_sample: u64,
    scalars: Vec<(String, f64)>,
}

#[derive(Clone, Debug)]
enum OwnedField {
    I32(Vec<i32>),
    F32(Vec<f32>),
}

impl OwnedStep {
    /// A copy of a step's data.
    pub fn new(data: &StepData<'_>) -> Self {
        let field = |(name, field): &(&str, Field<'_>)| {
            let values = match field {
                Field::I32(values) => OwnedField::I32(values.to_vec()),
                Field::F32(values) => OwnedField::F32(values.to_vec()),
            };
            ((*name).to_owned(), values)
        };
        let scalars = data.scalars.iter().map(|(name, value)| ((*name).to_owned(), *value));
        Self {
            fields: data.fields.iter().map(field).collect(),
            count: data.count,
            first_sample: data.first_sample,
            scalars: scalars.collect(),
        }
    }

    /// Gives the data to `run`.
    pub fn with<T>(&self, run: impl FnOnce(&StepData<'_>) -> T) -> T {
        let fields = self.fields.iter().map(|(name, values)| match values {
            OwnedField::I32(values) => (name.as_str(), Field::I32(values)),
            OwnedField::F32(values) => (name.as_str(), Field::F32(values)),
        });
        let fields: Vec<(&str, Field<'_>)> = fields.collect();
        let scalars: Vec<(&str, f64)> =
            self.scalars.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        let (count, first_sample) = (self.count, self.first_sample);
        run(&StepData { fields: &fields, count, first_sample, scalars: &scalars })
    }
}

/// The scalars of one run of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    pub(crate) lr: f64,
    /// The step, counted from 1.
    pub(crate) step: u64,
    pub(crate) seed: u64,
}

/// The buffers of one script that the host fills before each run.
pub(crate) struct Feed {
    script: ScriptId,
    /// Each with the step of the script that it belongs to, counted from 0.
    inputs: Vec<(BufferId, usize, Input)>,
    /// The micro-batches of a step.
    microbatches: usize,
    /// Rows of each micro-batch.
    rows: u64,
    /// The share of each micro-batch that these ranks take.
    share: BatchShare,
    bytes: Vec<u8>,
}

enum Input {
    Data {
        port: Arc<str>,
        ty: TensorType,
        runs: Vec<ElementRun>,
        microbatch: usize,
    },
    Random {
        instance: usize,
        microbatch: usize,
    },
    /// For one of the updates of its step, counted from 0, of which there are so many.
    Scalar {
        scalar: Scalar,
        dtype: DType,
        update: usize,
        updates: usize,
    },
}

impl Feed {
    /// Finds out what each of the script's host buffers is for, from its key.
    pub(crate) fn new<E: Engine>(
        executor: &Executor<E>,
        script: ScriptId,
        model: &Model,
        ranks: RankOnMesh<'_>,
        (microbatches, share): (usize, BatchShare),
    ) -> Result<Self> {
        let mut inputs = Vec::new();
        let updates = executor.script(script).updates.as_ref();
        let updates = updates.map_or(1, Updates::per_step);
        let counts = (microbatches, updates);
        for (buffer, key) in executor.host_inputs(script) {
            let ty = executor.script(script).read_type(buffer);
            let ty = ty.expect("a buffer that the host fills is read by some run");
            let (step, input) = Input::of(key, model, ty.clone(), ranks, counts)?;
            inputs.push((buffer, step, input));
        }
        let (rows, bytes) = (rows(model), Vec::new());
        Ok(Self { script, inputs, microbatches, rows, share, bytes })
    }

    /// Of how many steps the script reads something.
    pub(crate) fn steps(&self) -> usize {
        self.inputs.iter().map(|(_, step, _)| step + 1).fold(1, usize::max)
    }

    /// Fills the host buffers of a script of one step.
    pub(crate) fn write<E: Engine>(
        &mut self,
        executor: &mut Executor<E>,
        data: &StepData<'_>,
        scalars: Scalars,
    ) -> Result<()> {
        self.write_step(executor, 0, data, scalars)
    }

    /// Tells the engine what [`Feed::write`] will bring, while an earlier step runs.
    pub(crate) fn expect<E: Engine>(
        &mut self,
        executor: &mut Executor<E>,
        data: &StepData<'_>,
        scalars: Scalars,
    ) -> Result<()> {
        self.each(executor, 0, data, scalars, Executor::expect)
    }

    /// Fills the host buffers of one of the script's steps, counted from 0.
    pub(crate) fn write_step<E: Engine>(
        &mut self,
        executor: &mut Executor<E>,
        index: usize,
        data: &StepData<'_>,
        scalars: Scalars,
    ) -> Result<()> {
        self.each(executor, index, data, scalars, Executor::write)
    }

    /// Gives the bytes of each host buffer of one of the script's steps to `give`.
    fn each<E: Engine>(
        &mut self,
        executor: &mut Executor<E>,
        index: usize,
        data: &StepData<'_>,
        scalars: Scalars,
        give: GiveBytes<E>,
    ) -> Result<()> {
        for (buffer, _, input) in self.inputs.iter().filter(|(_, step, _)| *step == index) {
            let size = executor.script(self.script).buffers[buffer.0].bytes;
            let bytes = &mut self.bytes;
            match input {
                Input::Data { port, ty, runs, microbatch } => {
                    let field = data.fields.iter().find(|(name, _)| **name == **port);
                    let (_, field) = field.ok_or_else(|| missing(port, data))?;
                    if field.dtype() != ty.dtype {
                        return Err(other_type(port, field.dtype(), ty.dtype));
                    }
                    let expected = ty.elements() * self.microbatches * self.share.of;
                    if field.len() != expected {
                        return Err(wrong_size(port, field.len(), expected));
                    }
                    // Each micro-batch has the shares of all replicas one after the other.
                    let (part, of) =
                        (*microbatch * self.share.of + self.share.index, self.share.of);
                    field.bytes(part, self.microbatches * of, runs, size, bytes);
                }
                Input::Random { instance, microbatch } => {
                    let shares = *microbatch * self.share.of + self.share.index;
                    let first = data.first_sample + shares as u64 * self.rows;
                    let (low, high) = (scalars.seed as i32, (scalars.seed >> 32) as i32);
                    let key = [low, high, scalars.step as i32, *instance as i32, first as i32];
                    bytes.clear();
                    bytes.extend(key.iter().flat_map(|word| word.to_ne_bytes()));
                }
                Input::Scalar { scalar, dtype, update, updates } => {
                    let samples = self.rows * self.microbatches as u64;
                    let counts = (samples, *update, *updates);
                    let value = scalars.value(scalar, data, self.share, counts)?;
                    bytes.clear();
                    bytes.resize(size, 0);
                    encode(*dtype, &[value], bytes);
                }
            }
            give(executor, self.script, *buffer, bytes)?;
        }
        Ok(())
    }
}

/// What becomes of the bytes of a buffer.
type GiveBytes<E> = fn(
    &mut Executor<E>,
    ScriptId,
    BufferId,
    &[u8],
) -> std::result::Result<(), phalanx_runtime::RuntimeError>;

impl Scalars {
    /// The value of a scalar in a step of which these ranks have so many samples.
    ///
    /// The mean over replicas of their losses is the loss of the batch, if each divides its sum by its
    /// part of the whole count; not if it divided by its own.
    /// A step of several updates is as many batches: each has its part of the count, and the optimizer counts updates.
    fn value(
        &self,
        scalar: &Scalar,
        data: &StepData<'_>,
        share: BatchShare,
        (samples, update, updates): (u64, usize, usize),
    ) -> Result<f64> {
        let given = |name: &str| data.scalars.iter().find(|(own, _)| *own == name);
        match scalar {
            Scalar::LearningRate => Ok(self.lr),
            Scalar::Step => {
                let before = self.step.saturating_sub(1) * updates as u64;
                Ok((before + update as u64 + 1) as f64)
            }
            Scalar::InverseCount => Ok((share.of * updates) as f64 / data.count as f64),
            Scalar::InverseSamples => Ok(updates as f64 / samples as f64),
            other => match given(other.name()) {
                Some((_, value)) => Ok(*value),
                None => Err(nobody_gives(other.name())),
            },
        }
    }
}

impl Input {
    /// The input, and its step; a step has so many micro-batches and rounds.
    fn of(
        key: &BufferKey,
        model: &Model,
        ty: TensorType,
        ranks: RankOnMesh<'_>,
        (microbatches, updates): (usize, usize),
    ) -> Result<(usize, Self)> {
        match key {
            BufferKey::Random { instance, microbatch } => {
                let (step, microbatch) = (microbatch / microbatches, microbatch % microbatches);
                Ok((step, Input::Random { instance: *instance, microbatch }))
            }
            BufferKey::Data { port, microbatch } => {
                let runs = ty.local_runs(ranks.mesh, ranks.rank);
                let (step, microbatch) = (microbatch / microbatches, microbatch % microbatches);
                Ok((step, Input::Data { port: port.clone(), ty, runs, microbatch }))
            }
            BufferKey::Scalar(
                scalar @ (Scalar::Go
                | Scalar::LossScale
                | Scalar::GoodSteps
                | Scalar::Hysteresis
                | Scalar::Applied),
            ) => Err(nobody_gives(scalar.name())),
            BufferKey::Scalar(scalar) if ty.dtype.is_float() => {
                let (scalar, dtype) = (scalar.clone(), ty.dtype);
                Ok((0, Input::Scalar { scalar, dtype, update: 0, updates }))
            }
            BufferKey::UpdateScalar { scalar, update, rounds } if ty.dtype.is_float() => {
                // What takes several rounds is updated as many times less often.
                let updates = updates / rounds;
                let (step, update) = (update / updates, update % updates);
                let (scalar, dtype) = (scalar.clone(), ty.dtype);
                Ok((step, Input::Scalar { scalar, dtype, update, updates }))
            }
            other => Err(Error::refused(Problem::new(format!(
                "model {} reads {other:?}, which nothing provides",
                model.name
            )))),
        }
    }
}

fn nobody_gives(name: &str) -> Error {
    Error::refused(
        Problem::new(format!("the model reads the scalar `{name}`, which nothing provides"))
            .because("a step provides lr, step, inv_tokens and inv_samples; a batch may provide other scalars")
            .fix("read one of these, provide it with the batch, or declare it as a data port"),
    )
}

/// Rows of a micro-batch: the extent of dim 0 of the model's data.
fn rows(model: &Model) -> u64 {
    let mut extents = data_ports(model).filter_map(|(_, ty)| ty.shape.first().copied());
    extents.next().unwrap_or(1) as u64
}

/// The name and the type of each data port of a model's segments.
fn data_ports(model: &Model) -> impl Iterator<Item = (&str, &TensorType)> {
    let segments = model.segments().iter();
    segments.flat_map(|p| p.inputs_with(Role::Data).map(|port| (&*port.name, p.ty(port.value))))
}

fn missing(port: &str, data: &StepData<'_>) -> Error {
    let given: Vec<&str> = data.fields.iter().map(|(name, _)| *name).collect();
    Error::refused(
        Problem::new(format!("the model reads the data port `{port}`, which the batch lacks"))
            .because(format!("the batch has {}", given.join(", ")))
            .fix("name the batch's fields as the model names its data"),
    )
}

/// Numbers of the wrong type may have the right size, and would be read as other numbers.
fn other_type(port: &str, found: DType, expected: DType) -> Error {
    Error::refused(
        Problem::new(format!("the batch gives `{port}` as {found}, the model reads {expected}"))
            .because(format!("the model declares the data port `{port}` with {expected} elements"))
            .fix(format!("give {expected} values, or declare the port as {found}")),
    )
}

fn wrong_size(port: &str, found: usize, expected: usize) -> Error {
    Error::refused(
        Problem::new(format!(
            "the batch gives {found} values of `{port}`, a step reads {expected}"
        ))
        .fix("give batch size × row length values of the port's element type"),
    )
}
