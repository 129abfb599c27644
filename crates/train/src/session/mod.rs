//! One rank's training: a model, the script of its step, and an engine that runs it.
//!
//! A [`Session`] turns a model into programs ([`compile()`]), a schedule into a checked script, and
//! gives both to an executor. [`Session::step`] fills the step's inputs, runs the script and reads
//! two numbers; what a step does is all in the script.

mod compile;
mod feed;
mod forward;
mod numbers;
mod settings;
mod store;

use std::collections::BTreeMap;

use phalanx_engine::Engine;
use phalanx_ir::{DType, Model, Port, Program};
use phalanx_models::hf;
use phalanx_runtime::{Executor, Observed, ScriptId};
use phalanx_script::{
    BufferId, Compiled, Held, MemoryPlan, Ranks, Script, TrainPlan, Training, accumulate,
    eval_script, merge_adjacent, train_script,
};

pub use compile::{compile, compile_forward};
pub use feed::{Field, StepData};
pub use forward::Forward;
pub(crate) use numbers::encode;
pub use settings::{MemoryLimit, Settings};
pub use store::{ReadParam, initial};

use crate::error::{Error, Problem, Result};
use feed::{Feed, Scalars};
use forward::read_scalar;
use store::Store;

/// A model in the forms that a session runs. Their parameters are the same, in the same order.
#[derive(Clone, Debug)]
pub struct Models {
    /// The model whose loss is trained, for the shape of one micro-batch.
    pub train: Model,
    /// The model whose loss is evaluated, for the same shape: without dropout.
    pub evaluate: Option<Model>,
}

/// What a step tells.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// The mean loss of the batch, before the update.
    pub loss: f64,
    /// The global norm of the gradient, before clipping.
    pub grad_norm: f64,
}

/// A model in training on one rank.
pub struct Session<E: Engine> {
    executor: Executor<E>,
    settings: Settings,
    plan: TrainPlan,
    store: Store,
    train: (ScriptId, Feed),
    evaluate: Option<(ScriptId, Feed, BufferId)>,
    steps: u64,
}

/// The programs of a model and its training script, before any engine is involved.
pub fn plan(model: &Model, settings: &Settings) -> Result<(Compiled, TrainPlan)> {
    let compiled = compile(model, settings.precision, settings.recompute)?;
    let schedule = accumulate(model.instances().len(), settings.microbatches);
    let plan = train_script(&Training {
        model,
        compiled: &compiled,
        turns: &merge_adjacent(&schedule),
        precision: settings.precision,
        optimizer: settings.optimizer,
        clip: settings.clip,
        ranks: Ranks::alone(),
    })?;
    Ok((compiled, plan))
}

/// A session of which everything is known but the weights: it takes no memory for tensors yet.
pub struct Prepared<E: Engine> {
    executor: Executor<E>,
    settings: Settings,
    plan: TrainPlan,
    store: Store,
    train: (ScriptId, Feed),
    evaluate: Option<(ScriptId, Feed, BufferId)>,
}

impl<E: Engine> Prepared<E> {
    /// Plans, compiles and loads everything, and refuses what takes more memory than it may.
    pub fn new(engine: E, models: &Models, settings: Settings) -> Result<Self> {
        let model = &models.train;
        let (_, plan) = plan(model, &settings)?;
        let mut executor = Executor::new(engine);
        let train = executor.load(plan.script.clone())?;
        let evaluate = (models.evaluate.as_ref())
            .map(|evaluated| load_evaluation(&mut executor, evaluated, &plan, &settings))
            .transpose()?;
        if let Some(limit) = settings.memory_limit {
            limit.check(executor.arena())?;
        }
        let store = Store::new(train, model, plan.units.clone());
        let feed = Feed::new(&executor, train, model, settings.microbatches)?;
        Ok(Self { executor, settings, plan, store, train: (train, feed), evaluate })
    }

    /// Takes the memory, and the weights to start from out of `read`.
    pub fn start(self, read: &mut ReadParam<'_>) -> Result<Session<E>> {
        let Self { mut executor, settings, plan, store, train, evaluate } = self;
        executor.reserve()?;
        for (unit, buffers) in plan.buffers.iter().enumerate() {
            let into: Vec<&Held> = [&buffers.weights].into_iter().chain(&buffers.master).collect();
            store.fill(&mut executor, unit, &into, read)?;
        }
        Ok(Session { executor, settings, plan, store, train, evaluate, steps: 0 })
    }
}

impl<E: Engine> Session<E> {
    /// Plans, compiles and loads everything; `read` gives the weights to start from.
    pub fn new(
        engine: E,
        models: &Models,
        settings: Settings,
        read: &mut ReadParam<'_>,
    ) -> Result<Self> {
        Prepared::new(engine, models, settings)?.start(read)
    }

    /// Takes one optimizer step with this learning rate.
    pub fn step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        let scalars = Scalars { lr, step: self.steps + 1, seed: self.settings.seed };
        let (script, feed) = &mut self.train;
        feed.write(&mut self.executor, data, scalars)?;
        self.executor.run(*script)?;
        self.steps += 1;
        let bytes = self.settings.precision.state.size();
        let mut read = |buffer| read_scalar(&mut self.executor, *script, buffer, bytes);
        Ok(StepResult { loss: read(self.plan.loss)?, grad_norm: read(self.plan.grad_norm)? })
    }

    /// The mean loss of a batch under the present weights, which stay as they are.
    pub fn evaluate(&mut self, data: &StepData<'_>) -> Result<f64> {
        let Some((script, feed, loss)) = &mut self.evaluate else {
            let message = "the session was made without a model to evaluate";
            return Err(Error::refused(Problem::new(message)));
        };
        let scalars = Scalars { lr: 0.0, step: self.steps, seed: self.settings.seed };
        feed.write(&mut self.executor, data, scalars)?;
        self.executor.run(*script)?;
        let bytes = self.executor.script(*script).buffers[loss.0].bytes;
        read_scalar(&mut self.executor, *script, *loss, bytes)
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The parameters by name, in full precision: masters where there are some.
    pub fn params(&mut self) -> Result<BTreeMap<String, hf::Tensor>> {
        let buffers = self.plan.buffers.iter();
        let buffers = buffers.map(|b| b.master.as_ref().unwrap_or(&b.weights));
        self.store.tensors(&mut self.executor, buffers)
    }

    /// The gradients of the last step by parameter name, before clipping.
    pub fn gradients(&mut self) -> Result<BTreeMap<String, hf::Tensor>> {
        let buffers = self.plan.buffers.iter().map(|b| &b.gradient);
        self.store.tensors(&mut self.executor, buffers)
    }

    /// Settings that keep numbers finite for longer, and that are not on yet.
    pub(crate) fn remedies(&self) -> Vec<&'static str> {
        let narrow = |port: &Port, program: &Program| program.ty(port.value).dtype == DType::Bf16;
        let mut programs = self.script().programs.iter().map(|entry| &entry.program);
        let computes_narrow = programs.any(|p| p.inputs().iter().any(|port| narrow(port, p)));
        let mut remedies = Vec::new();
        if self.settings.clip.is_none() {
            remedies.push("clip gradients (optim.clip = 1.0)");
        }
        if computes_narrow {
            remedies.push("compute in f32 (precision.compute)");
        }
        remedies
    }

    /// The script of a step.
    pub fn script(&self) -> &Script {
        self.executor.script(self.train.0)
    }

    /// Where the script's buffers lie, and what they cost.
    pub fn memory(&self) -> &MemoryPlan {
        self.executor.plan(self.train.0)
    }

    /// Bytes of the arena, which training and evaluation share.
    pub fn arena(&self) -> usize {
        self.executor.arena()
    }

    /// Runs a step twice under observation, on the batch of the last step, and tells which bytes
    /// it wrote. Weights and state are put back afterwards.
    pub fn observe(&mut self) -> Result<Observed> {
        Ok(self.executor.observe(self.train.0)?)
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        self.executor.engine()
    }

    /// FLOPs of the programs of one step, multiplications and additions counted apart.
    pub fn flops_per_step(&self) -> u64 {
        let script = self.script();
        let runs = script.actions.iter().filter_map(|action| action.run());
        runs.map(|run| script.programs[run.program.0].program.flops()).sum()
    }
}

fn load_evaluation<E: Engine>(
    executor: &mut Executor<E>,
    model: &Model,
    plan: &TrainPlan,
    settings: &Settings,
) -> Result<(ScriptId, Feed, BufferId)> {
    let (precision, parts) = (settings.precision, settings.microbatches);
    let compiled = compile_forward(model, precision.weights)?;
    let (script, loss) = eval_script(model, &compiled, parts, plan, precision, Ranks::alone())?;
    let script = executor.load(script)?;
    let feed = Feed::new(executor, script, model, parts)?;
    Ok((script, feed, loss))
}
