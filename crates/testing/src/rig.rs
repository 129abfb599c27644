//! A trainer in its smallest form: a script, an executor, and named access to what it holds.

use std::sync::Arc;
use std::time::Instant;

use phalanx_autodiff::Recompute;
use phalanx_engine::Engine;
use phalanx_ir::{DType, Model, Param, TensorType};
use phalanx_models::initial_values;
use phalanx_reference::RefTensor;
use phalanx_runtime::{Executor, ScriptId, TimedAction};
use phalanx_script::{
    BufferId, BufferKey, Category, Compiled, Inference, Library, LossScaling, Member, Number,
    Optimizer, PlannedScript, Precision, RankPlace, Scalar, ScheduledRun, Script, StageGroup,
    State, TrainingScript, Value, World, accumulate, eval_script, forward as forward_turns,
    merge_adjacent, plan, train_script,
};

use crate::compile::compile;

/// How a model is trained.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Element types.
    pub precision: Precision,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The largest gradient norm.
    pub clip: Option<f64>,
    /// How the loss is scaled, if it is.
    pub scaling: Option<LossScaling>,
    /// Micro-batches of a step.
    pub microbatches: usize,
    /// What the backward recomputes.
    pub recompute: Recompute,
    /// From instances and micro-batches to the order of runs.
    pub schedule: fn(usize, usize) -> Vec<ScheduledRun>,
    /// From a model to programs.
    pub compile: fn(&Model, DType, Recompute) -> Compiled,
    /// Changes the training script before it is loaded.
    pub edit: fn(&mut Script),
}

impl Setup {
    /// AdamW as the fixtures are trained (betas 0.9 and 0.95, epsilon 1e-8, decay 0.1, clip 1) on
    /// one micro-batch, with weights of this type; 16-bit weights have f32 masters and gradients.
    pub fn new(weights: DType) -> Self {
        let wide = weights.accumulator();
        Self {
            precision: Precision { weights, grads: wide, state: wide, split: false },
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 },
            clip: Some(1.0),
            scaling: None,
            microbatches: 1,
            recompute: Recompute::None,
            schedule: |instances, microbatches| {
                merge_adjacent(&accumulate(instances, microbatches), instances)
            },
            compile,
            edit: |_| {},
        }
    }
}

/// The data of one micro-batch by port name, and the global index of its first sample.
#[derive(Clone, Debug, Default)]
pub struct RigBatch {
    /// Port name and values.
    pub data: Vec<(String, RefTensor)>,
    /// The global index of the first sample.
    pub first: i32,
}

/// A model in training on an engine.
pub struct Rig<E: Engine> {
    executor: Executor<E>,
    id: ScriptId,
    /// A forward script on the same weights, if the rig has one.
    forward: Option<ScriptId>,
    state: State,
    model: Model,
    precision: Precision,
    steps: usize,
}

impl<E: Engine> Rig<E> {
    /// Compiles a model for training; its parameters are zero until they are set.
    pub fn new(engine: E, model: &Model, setup: &Setup) -> Self {
        Self::beside(engine, model, None, setup)
    }

    /// The same, with a model of the same parameters to look at ([`Rig::probe`]).
    pub fn with_forward(engine: E, model: &Model, forward: &Model, setup: &Setup) -> Self {
        Self::beside(engine, model, Some(forward), setup)
    }

    fn beside(engine: E, model: &Model, forward: Option<&Model>, setup: &Setup) -> Self {
        let precision = setup.precision;
        let compile = |model| (setup.compile)(model, precision.grads, setup.recompute);
        let schedule = (setup.schedule)(model.instances().len(), setup.microbatches);
        let (optimizer, clip, scaling) = (setup.optimizer, setup.clip, setup.scaling);
        let (compiled, at) = (compile(model), RankPlace::default());
        let library = Arc::new(Library::new(engine.requirements()));
        let stage_groups = vec![StageGroup::alone(&compiled, &schedule)];
        let world = World::new(model, stage_groups, library.clone()).unwrap();
        let training = TrainingScript { world: &world, at, precision, optimizer, clip, scaling };
        let state = training.state().unwrap();
        let mut script = train_script(&training, &state).unwrap();
        (setup.edit)(&mut script);
        // State is placed as the script has it, for an edit may change its sizes.
        let table = state.script();
        let buffers = script.buffers[..table.buffers.len()].to_vec();
        let base = plan(&Script { buffers, ..table }).unwrap();
        let planned = |script| Arc::new(PlannedScript::new(script, Some(&base)).unwrap());
        let mut executor = Executor::new(engine);
        let id = executor.load(planned(script)).unwrap();
        let forward = forward.map(|model| {
            let (compiled, turns) = (compile(model), forward_turns(0..model.instances().len(), 1));
            let stage_groups = vec![StageGroup::alone(&compiled, &turns)];
            let world = World::new(model, stage_groups, library).unwrap();
            let forward = Inference { world: &world, at, weights: precision.weights };
            executor.load(planned(eval_script(&forward, &state).unwrap())).unwrap()
        });
        executor.reserve().unwrap();
        for kept in &state.scalars {
            let bytes = RefTensor::scalar(kept.dtype, kept.initial).to_bytes();
            executor.write(id, kept.buffer, &bytes).unwrap();
        }
        Self { executor, id, forward, state, model: model.clone(), precision, steps: 0 }
    }

    /// Sets every parameter to its initial values.
    pub fn initialise(&mut self, seed: u64) {
        self.set_params(|param| initial_values(param, seed, 0..param.elements()).collect());
    }

    /// Sets every parameter, and its master if it has one.
    pub fn set_params(&mut self, values: impl Fn(&Param) -> Vec<f64>) {
        for index in 0..self.model.params().len() {
            let values = values(&self.model.params()[index]);
            let (unit, member) = self.place(index);
            let buffers = self.state.buffers[unit].clone();
            let Precision { weights, state, .. } = self.precision;
            self.store(buffers.weights.buffer, member, weights, &values);
            if let Some(master) = buffers.master {
                self.store(master.buffer, member, state, &values);
            }
        }
    }

    /// Runs one step, whose micro-batches these are, and returns loss and gradient norm.
    /// `inverse` is 1/valid targets.
    pub fn step(&mut self, batches: &[RigBatch], lr: f64, inverse: f64) -> (f64, f64) {
        self.steps += 1;
        self.run(self.id, batches, lr, inverse);
        self.results()
    }

    /// Runs the script of the last step once more, on the same inputs and on a clock: the times of
    /// its actions, and its loss and gradient norm.
    pub fn traced(&mut self) -> (Vec<TimedAction>, (f64, f64)) {
        let timed = self.executor.run_traced(self.id, Instant::now()).unwrap();
        (timed, self.results())
    }

    fn results(&mut self) -> (f64, f64) {
        let state = self.precision.state;
        let mut number = |number| {
            let buffer = self.script().find(&BufferKey::Number(number)).unwrap();
            self.fetch(buffer, state)[0]
        };
        (number(Number::Loss), number(Number::GradNorm))
    }

    /// Runs the forward model on one batch and returns the probe `name` of its instance `instance`.
    pub fn probe(&mut self, batch: &RigBatch, instance: &str, name: &str) -> Vec<f64> {
        let forward = self.forward.unwrap();
        self.run(forward, std::slice::from_ref(batch), 0.0, 0.0);
        let script = self.executor.script(forward);
        let instance = script.names.instances.iter().position(|i| i == instance).unwrap();
        let value = Value { instance, port: name.into(), microbatch: 0, again: false };
        let buffer = script.find(&BufferKey::Value(value)).unwrap();
        let mut bytes = vec![0; script.buffers[buffer.0].bytes];
        self.executor.read(forward, buffer, &mut bytes).unwrap();
        decode(self.precision.weights, &bytes)
    }

    /// The gradient of a parameter in the last step.
    pub fn gradient(&mut self, name: &str) -> Vec<f64> {
        let (unit, member) = self.place(self.number(name));
        let values = self.fetch(
            self.state.buffers[unit].gradient.as_ref().unwrap().buffer,
            self.precision.grads,
        );
        values[member.offset..][..member.elements].to_vec()
    }

    /// A parameter as the optimizer sees it.
    pub fn param(&mut self, name: &str) -> Vec<f64> {
        let (unit, member) = self.place(self.number(name));
        let buffers = &self.state.buffers[unit];
        let buffer = buffers.master.as_ref().unwrap_or(&buffers.weights).buffer;
        let values = self.fetch(buffer, self.precision.state);
        values[member.offset..][..member.elements].to_vec()
    }

    /// A number that is kept from step to step.
    pub fn scalar(&mut self, scalar: &Scalar) -> f64 {
        let kept = self.state.scalars.iter().find(|kept| kept.scalar == *scalar).unwrap();
        self.fetch(kept.buffer, kept.dtype)[0]
    }

    /// The executor.
    pub fn executor(&mut self) -> &mut Executor<E> {
        &mut self.executor
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// For each category: the bytes that a step was planned to write, and those that it wrote.
    pub fn memory(&mut self) -> Vec<(Category, usize, usize)> {
        let observed = self.executor.observe(self.id).unwrap();
        let plan = self.executor.plan(self.id);
        let rows = observed.peaks.into_iter();
        rows.map(|(category, bytes)| (category, plan.peak(category), bytes)).collect()
    }

    /// The script of a step.
    pub fn script(&self) -> &Script {
        self.executor.script(self.id)
    }

    /// The state that persists between steps.
    pub fn state(&self) -> &State {
        &self.state
    }

    fn run(&mut self, id: ScriptId, batches: &[RigBatch], lr: f64, inverse: f64) {
        let hosts: Vec<(BufferId, BufferKey)> =
            (self.executor.host_inputs(id)).map(|(buffer, key)| (buffer, key.clone())).collect();
        for (buffer, key) in hosts {
            let ty = self.executor.script(id).read_type(buffer).unwrap().clone();
            let bytes = self.host_bytes(&ty, &key, batches, lr, inverse);
            self.executor.write(id, buffer, &bytes).unwrap();
        }
        self.executor.run(id).unwrap();
    }

    fn host_bytes(
        &self,
        ty: &TensorType,
        key: &BufferKey,
        batches: &[RigBatch],
        lr: f64,
        inverse: f64,
    ) -> Vec<u8> {
        let scalar = |x| RefTensor::scalar(ty.dtype, x).to_bytes();
        match key {
            BufferKey::Random { instance, microbatch } => {
                let first = batches[*microbatch].first;
                let key = [7, 0, self.steps as i32, *instance as i32, first];
                RefTensor::from_i32(&[5], &key).unwrap().to_bytes()
            }
            BufferKey::Scalar(Scalar::LearningRate) => scalar(lr),
            BufferKey::Scalar(Scalar::Step) => scalar(self.steps as f64),
            BufferKey::Scalar(Scalar::InverseCount) => scalar(inverse),
            BufferKey::Scalar(Scalar::InverseSamples) => {
                let rows = |batch: &RigBatch| batch.data[0].1.shape()[0];
                scalar(1.0 / batches.iter().map(rows).sum::<usize>() as f64)
            }
            BufferKey::Data { port, microbatch } => {
                let mut data = batches[*microbatch].data.iter();
                let (_, values) = data.find(|(name, _)| **name == **port).unwrap();
                assert_eq!(values.dtype(), ty.dtype, "the data `{port}`");
                values.to_bytes()
            }
            other => panic!("nothing provides {other:?}"),
        }
    }

    fn number(&self, name: &str) -> usize {
        let mut params = self.model.params().iter();
        params.position(|p| p.name == name).unwrap()
    }

    /// The unit of a parameter and its place in it.
    fn place(&self, param: usize) -> (usize, Member) {
        let units = self.state.units.iter().enumerate();
        let mut members = units.flat_map(|(i, unit)| unit.members.iter().map(move |m| (i, *m)));
        members.find(|(_, m)| m.param == param).unwrap()
    }

    fn store(&mut self, buffer: BufferId, member: Member, dtype: DType, values: &[f64]) {
        let mut bytes = vec![0; self.script().buffers[buffer.0].bytes];
        self.executor.read(self.id, buffer, &mut bytes).unwrap();
        let new = RefTensor::new(dtype, &[values.len()], values).unwrap();
        let (at, new) = (member.offset * dtype.size(), new.to_bytes());
        bytes[at..at + new.len()].copy_from_slice(&new);
        self.executor.write(self.id, buffer, &bytes).unwrap();
    }

    /// All elements of a buffer.
    fn fetch(&mut self, buffer: BufferId, dtype: DType) -> Vec<f64> {
        let mut bytes = vec![0; self.script().buffers[buffer.0].bytes];
        self.executor.read(self.id, buffer, &mut bytes).unwrap();
        decode(dtype, &bytes)
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let shape = [bytes.len() / dtype.size()];
    RefTensor::from_bytes(dtype, &shape, bytes).unwrap().values()
}
