//! A model in training on one or many ranks.
//!
//! [`Lowered`] partitions a model over a mesh and compiles its programs; a [`Planner`] turns them
//! and a schedule into checked scripts. A [`Backend`] launches the ranks of this process, each a
//! [`RankWorker`] with an engine, and a [`Session`] gives them commands: [`Session::step`] lets
//! each fill its part of the step's inputs, run its scripts and read two numbers. What a step does
//! is all in the scripts.

#![forbid(unsafe_code)]

mod accuracy;
pub mod again;
mod asynchronous;
mod backend;
mod choose;
mod codec;
mod command;
mod compile;
mod copies;
pub mod corpus;
pub mod custom;
mod exposed;
mod fault;
mod feed;
pub mod folders;
mod forward;
pub mod host;
pub mod hosts;
pub mod job;
mod known;
pub mod launch;
mod load;
mod lowered;
mod measure;
mod models;
pub mod network;
mod numbers;
mod over_replicas;
mod parallel;
mod parked;
mod pipeline;
pub mod planned;
mod planner;
pub mod predict;
mod prepared;
pub mod products;
pub mod profile;
mod pulse;
pub mod rate;
mod replicas;
mod restore;
mod rooms;
pub mod run_weights;
mod save;
mod settings;
mod store;
mod together;
mod traced;
mod worker;
mod writing;

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Instant;

use phalanx_comm::{Failure, Membership, PoolFailure};
use phalanx_config::DeviceKind;
use phalanx_ir::{DType, Param, Port, Program};
use phalanx_models::hf;
use phalanx_runtime::Observed;
use phalanx_script::{ExpertRecord, ReadLayout, ScriptKey, StateKind, StateOf};

pub use accuracy::Accuracy;
pub use backend::{Backend, EngineBackend, Size, Timing};
pub use command::{
    BatchSource, Command, Exposed, LocalRanks, Measured, Reply, StatePiece, StateRange, StepReply,
};
pub use feed::{Field, OwnedStep, StepData};
pub use forward::Forward;
pub use load::ExpertLoad;
pub use lowered::{BLOCK, Lowered, ROW, TrainPlan};
pub use models::{ForwardModel, Models};
pub(crate) use numbers::encode;
pub use parallel::{ExpertChoice, Parallel, SharedStrategy, channels_plan, heights_plan};
pub use pipeline::{InstanceCosts, Pipeline, PipelineOrder, StageSplit};
pub use planner::{ClassPlan, Planner};
pub use prepared::Prepared;
pub use replicas::{BatchShare, Replicas};
pub use restore::{Restored, Seeded, StateSource, read_as};
pub use rooms::{Bound, Rooms};
pub use save::{SaveTargets, SavedFiles};
pub use settings::{MemoryExcess, MemoryLimit, Settings};
pub use store::{ReadParam, from_weights, initial};
pub use traced::{RankScript, Timetable, Trace, Traced, TracedStep};
pub use worker::RankWorker;

use command::Given;
use known::Known;
use over_replicas::mean;
use phalanx_error::{Error, Problem, Result};

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// The mean loss of the batch, before the update.
    pub loss: f64,
    /// The global norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// How the loss was scaled, if it was.
    pub scaling: Option<StepScale>,
    /// Whether the step was done twice, because its forwards had read weights that were not certain yet.
    pub repeated: bool,
    /// How much room it had for rows of experts, and whether it was taken again for want of some.
    pub room: StepRoom,
}

/// The room that a step had for rows of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepRoom {
    /// Which bound it had when it was applied, counted from 0.
    pub bound: usize,
    /// How many times it was taken again with a larger one.
    pub repeats: usize,
    /// How many rows, over all layers and micro-batches, found no room the first time.
    pub lacking: u64,
}

/// The loss scale of a step, and what became of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepScale {
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// Whether a gradient was too large for its type, so that the step changed nothing.
    pub overflowed: bool,
    /// How many steps have changed nothing so far, this one included.
    pub skipped: u64,
}

/// A model in training.
pub struct Session {
    ranks: Box<dyn LocalRanks>,
    known: Known,
    steps: u64,
    /// The step that is to be traced, and what was found.
    trace_at: Option<u64>,
    trace: Option<Trace>,
    /// The bound of the room for rows of experts in the last step, counted from 0.
    bound: usize,
    /// What the last step has logged of its experts, if steps choose how they read them.
    logged: Option<ExpertRecord>,
    /// Whether the other processes do what this one says, instead of the same by themselves.
    leads: bool,
}

impl Session {
    /// Plans, compiles and loads everything; `read` gives the weights to start from.
    pub fn new(models: &Models, settings: Settings, read: &ReadParam<'_>) -> Result<Self> {
        Prepared::new(models, settings)?.start(read)
    }

    /// Takes one optimizer step with this learning rate.
    pub fn step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        self.step_before(data, lr, None)
    }

    /// The same, with what the next step will get, if it is known: a device may fetch it while this step
    /// runs. The next step may be given something else.
    pub fn step_before(
        &mut self,
        data: &StepData<'_>,
        lr: f64,
        next: Option<(&OwnedStep, f64)>,
    ) -> Result<StepResult> {
        let taken = self.take(1, &Given { data, lr, next })?;
        Ok(taken.last().copied().expect("one step was taken"))
    }

    /// Whether it helps a step to know the next one's data.
    pub fn looks_ahead(&self) -> bool {
        self.known.settings.device == DeviceKind::Cuda
    }

    /// Runs `count` steps, for which ranks ask for their batches, and gives their results; fewer if
    /// a step is not applied.
    pub fn take(&mut self, count: u64, batches: &dyn BatchSource) -> Result<Vec<StepResult>> {
        match self.known.settings.parallel.experts.clone() {
            None => self.take_as(ReadLayout::Own, count, batches),
            Some(experts) => self.take_choosing(&*experts.policy, count, batches),
        }
    }

    /// The same, where all steps read experts in one way.
    fn take_as(
        &mut self,
        experts: ReadLayout,
        count: u64,
        batches: &dyn BatchSource,
    ) -> Result<Vec<StepResult>> {
        let from = self.steps + 1;
        let trace = self.trace_at.filter(|step| (from..from + count).contains(step));
        let trace = trace.map(|step| (step, Instant::now()));
        let answers = self.ranks.ask(Command::Steps { from, count, experts, batches, trace })?;
        let mut by_rank: Vec<Vec<StepReply>> = answers.into_iter().map(Reply::into_steps).collect();
        if let Some((step, _)) = trace {
            let timed = |steps: &mut Vec<StepReply>| {
                let at = steps.get_mut((step - from) as usize)?;
                at.traced.take()
            };
            let traced: Vec<TracedStep> = by_rank.iter_mut().filter_map(timed).collect();
            let script = traced.first().map_or(ScriptKey::Train, |first| first.script);
            let scripts = self.known.scripts[&script].clone();
            let ranks = traced.into_iter().map(|own| own.actions).collect();
            let timetable = self.known.timetable.clone();
            self.trace = Some(Trace { step, timetable, ranks, scripts });
        }
        // All ranks of a replica give the same results.
        let taken: Vec<StepResult> = by_rank[0].iter().map(|step| step.result).collect();
        self.steps += taken.len() as u64;
        self.bound = taken.last().map_or(self.bound, |last| last.room.bound);
        if self.known.first_ranks.len() == 1 {
            return Ok(taken);
        }
        let numbers = |steps: &Vec<StepReply>| {
            steps.iter().flat_map(|step| [step.result.loss, step.result.grad_norm]).collect()
        };
        let means = self.over_replicas(by_rank.iter().map(numbers).collect())?;
        let mean = |(numbers, own): (&[f64; 2], &StepResult)| {
            let [loss, grad_norm] = *numbers;
            StepResult { loss, grad_norm, ..*own }
        };
        Ok(means.as_chunks::<2>().0.iter().zip(&taken).map(mean).collect())
    }

    /// At least and at most how many steps that are taken together run without waiting in between; one if none do.
    pub fn together(&self) -> RangeInclusive<usize> {
        self.known.together.clone()
    }

    /// Asks for a measured timeline of this step, counted from 1, when it is taken. The step does the
    /// same as any other.
    pub fn trace_at(&mut self, step: u64) {
        self.trace_at = Some(step);
    }

    /// The timeline that was asked for, once, after its step.
    pub fn take_trace(&mut self) -> Option<Trace> {
        self.trace.take()
    }

    /// The mean loss of a batch with the current weights, which do not change. Replicas that train by
    /// themselves evaluate a share of it each, with their own weights.
    pub fn evaluate(&mut self, data: &StepData<'_>) -> Result<f64> {
        let answers = self.ranks.ask(Command::Evaluate(data))?;
        let losses: Vec<f64> = answers.into_iter().map(Reply::into_loss).collect();
        let loss = *losses.first().expect("a process has a rank");
        if self.known.first_ranks.len() == 1 {
            return Ok(loss);
        }
        let means = self.over_replicas(losses.into_iter().map(|loss| vec![loss]).collect())?;
        Ok(means.first().copied().unwrap_or(loss))
    }

    /// What the model predicts for a batch of one micro-batch with the current weights: the values
    /// that it exposes, by name, each whole.
    pub fn predict(&mut self, data: &StepData<'_>) -> Result<BTreeMap<String, hf::WeightTensor>> {
        if self.known.first_ranks.len() > 1 {
            let problem = Problem::new("replicas that train by themselves do not predict");
            return Err(Error::refused(
                problem.fix("predict with the weights of the finished run"),
            ));
        }
        self.ranks.ask(Command::Predict(data))?;
        let exposed = self.known.exposed.clone();
        exposed.into_iter().map(|port| Ok((port.clone(), self.exposed(&port)?))).collect()
    }

    fn exposed(&mut self, port: &str) -> Result<hf::WeightTensor> {
        let key = ScriptKey::Predict;
        let answers = self.ranks.ask(Command::Show { key, port, instance: None, microbatch: 0 })?;
        forward::gathered(port, answers)
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks.world()
    }

    /// All parameters by name, in full precision: master weights if there are any. For large
    /// models, use [`Session::param`].
    pub fn params(&mut self) -> Result<BTreeMap<String, hf::WeightTensor>> {
        self.all(Self::param)
    }

    /// All gradients of the last step by parameter name, before clipping. For large models, use
    /// [`Session::gradient`].
    pub fn gradients(&mut self) -> Result<BTreeMap<String, hf::WeightTensor>> {
        self.all(Self::gradient)
    }

    /// The model's parameters, in its order.
    pub fn parameters(&self) -> &[Param] {
        &self.known.params
    }

    /// The shape of a state of a parameter.
    pub fn state_shape(&self, param: usize, kind: StateKind) -> Vec<usize> {
        let of = match kind {
            StateKind::Optimizer(number) => self.known.settings.optimizer.state_of(number),
            _ => StateOf::Elements,
        };
        of.shape(&self.known.params[param].shape)
    }

    /// The state that holds parameters in full precision.
    pub fn full_kind(&self) -> StateKind {
        self.known.settings.precision.full_kind()
    }

    /// The element type of parameters in full precision.
    pub fn state_dtype(&self) -> DType {
        self.known.settings.precision.state
    }

    /// One parameter, by its index, in full precision: its master copy if there is one.
    pub fn param(&mut self, param: usize) -> Result<hf::WeightTensor> {
        self.tensor(param, self.known.settings.precision.full_kind())
    }

    /// Some values of one parameter in full precision: their element type and their bytes.
    pub fn read_param(&mut self, param: usize, elements: Range<usize>) -> Result<(DType, Vec<u8>)> {
        self.read(param, self.known.settings.precision.full_kind(), elements)
    }

    /// The gradient of one parameter in the last step, by the parameter's index, before clipping.
    pub fn gradient(&mut self, param: usize) -> Result<hf::WeightTensor> {
        self.tensor(param, StateKind::Gradient)
    }

    /// Some values of a state, by their indices in the whole parameter: their element type and
    /// their bytes. Of replicas that train by themselves: the mean.
    pub fn read(
        &mut self,
        param: usize,
        kind: StateKind,
        elements: Range<usize>,
    ) -> Result<(DType, Vec<u8>)> {
        let range = StateRange { param, kind, elements };
        let mut replicas = self.read_replicas(&range)?;
        match replicas.len() {
            1 => Ok(replicas.remove(0)),
            _ => Ok(mean(&replicas)),
        }
    }

    /// For each rank: which of some values of a state it holds.
    pub fn held(&mut self, range: &StateRange) -> Result<Vec<Vec<StatePiece>>> {
        self.tell_followers(range)?;
        let answers = self.ranks.ask(Command::Read(range))?;
        Ok(answers.into_iter().map(Reply::into_pieces).collect())
    }

    /// Whether the session has a model that predicts.
    pub fn predicts(&self) -> bool {
        !self.known.exposed.is_empty()
    }

    fn tensor(&mut self, param: usize, kind: StateKind) -> Result<hf::WeightTensor> {
        let Param { shape, .. } = &self.known.params[param];
        let (shape, elements) = (shape.clone(), self.known.params[param].elements());
        let (dtype, bytes) = self.read(param, kind, 0..elements)?;
        Ok(hf::WeightTensor::from_bytes(shape, dtype, &bytes))
    }

    fn all(
        &mut self,
        tensor: fn(&mut Self, usize) -> Result<hf::WeightTensor>,
    ) -> Result<BTreeMap<String, hf::WeightTensor>> {
        let all = 0..self.known.params.len();
        all.map(|param| Ok((self.known.params[param].name.clone(), tensor(self, param)?))).collect()
    }

    /// Whether a dynamic loss scale cannot fall any further.
    pub fn is_least(&self, scale: f64) -> bool {
        let scaling = self.known.settings.scaling;
        let rule = scaling.and_then(|own| own.rule);
        rule.is_some_and(|rule| scale <= rule.least)
    }

    /// Settings that help against overflow and are not on yet.
    pub fn remedies(&self) -> Vec<&'static str> {
        let narrow = |port: &Port, program: &Program| program.ty(port.value).dtype == DType::Bf16;
        let mut programs = self.script().programs.iter().map(|entry| entry.program());
        let computes_narrow = programs.any(|p| p.inputs().iter().any(|port| narrow(port, p)));
        let mut remedies = Vec::new();
        if self.known.settings.clip.is_none() {
            remedies.push("clip gradients (optim.clip = 1.0)");
        }
        if computes_narrow {
            remedies.push("compute in f32 (precision.compute)");
        }
        remedies
    }

    /// Runs a step twice, on the batch of the last step, and observes which bytes each rank writes.
    /// Weights and state are restored afterwards.
    pub fn observe(&mut self) -> Result<Vec<Observed>> {
        let answers = self.ranks.ask(Command::Observe)?.into_iter().map(Reply::into_observed);
        let (bounds, observed): (Vec<usize>, _) = answers.unzip();
        self.bound = bounds.first().copied().unwrap_or(self.bound);
        Ok(observed)
    }

    /// For each rank: what it has counted so far.
    pub fn measure(&mut self) -> Result<Vec<Measured>> {
        let answers = self.ranks.ask(Command::Measure)?;
        Ok(answers.into_iter().map(Reply::into_measured).collect())
    }
}

/// The error of a rank that failed, with the rank's number if there are several.
pub fn lost(lost: impl Into<PoolFailure<Error>>, ranks: usize) -> Error {
    let lost = lost.into();
    let elsewhere = |job: &Arc<Membership>| job.ranks() == ranks && job.rank() != lost.failure.rank;
    if !lost.refused && lost.error.is_none() && job::joined().is_some_and(elsewhere) {
        return job::elsewhere(lost.failure, ranks);
    }
    let Failure { rank, message } = lost.failure;
    let place = format!("on rank {rank} of {ranks}");
    match lost.error {
        None if lost.refused => Error::refused(Problem::new(message.to_string())),
        Some(error) if ranks == 1 => error,
        Some(error) => error.because(place),
        None if ranks == 1 => Error::failed(Problem::new(message.to_string())),
        None => Error::failed(Problem::new(message.to_string()).because(place)),
    }
}
