//! One rank of a session: its script, and the engine that runs it.

use std::collections::BTreeMap;
use std::time::Instant;

use phalanx_engine::Engine;
use phalanx_models::hf;
use phalanx_runtime::{Executor, Observed, RuntimeError, ScriptId};
use phalanx_script::{BufferId, Held, MemoryPlan, Script, TrainPlan};

use super::feed::{Feed, Scalars, StepData};
use super::forward::read_scalar;
use super::lowered::Lowered;
use super::store::{Piece, ReadParam, Store, assemble};
use super::traced::{Traced, describe};
use super::{Models, Settings, StepResult};
use crate::error::{Error, Problem, Result};

/// One rank of a model in training. Alone, it is the whole of it.
pub struct RankSession<E: Engine> {
    executor: Executor<E>,
    settings: Settings,
    plan: TrainPlan,
    store: Store,
    train: (ScriptId, Feed),
    evaluate: Option<(ScriptId, Feed, BufferId)>,
    steps: u64,
}

impl<E: Engine> RankSession<E> {
    /// The only rank of a session: plans, compiles and loads everything; `read` gives the weights
    /// to start from.
    pub fn alone(
        engine: E,
        models: &Models,
        settings: Settings,
        read: &ReadParam<'_>,
    ) -> Result<Self> {
        let lowered = Lowered::new(models, settings)?;
        let mut session = Self::load(engine, &lowered, 0)?;
        let arena = session.arena();
        let limit = lowered.settings.memory_limit;
        if let Some(over) = limit.and_then(|limit| limit.over(arena, arena, session.memory())) {
            return Err(Error::refused(over.problem()));
        }
        session.start(read)?;
        Ok(session)
    }

    /// One rank of those that a model was lowered for: plans its scripts and compiles them. It takes no
    /// memory for tensors yet.
    pub fn load(engine: E, lowered: &Lowered, rank: usize) -> Result<Self> {
        let plan = lowered.plan(rank)?;
        let settings = lowered.settings.clone();
        let mut executor = Executor::new(engine);
        let train = executor.load(plan.script.clone())?;
        let (ranks, parts) = (lowered.at(rank), settings.microbatches);
        let feed = Feed::new(&executor, train, &lowered.model, ranks, parts)?;
        let evaluate = match lowered.evaluation(rank, &plan)? {
            None => None,
            Some((model, script, loss)) => {
                let script = executor.load(script)?;
                let feed = Feed::new(&executor, script, model, ranks, parts)?;
                Some((script, feed, loss))
            }
        };
        let types = lowered.param_types(rank);
        let store = Store::new(train, &lowered.model, types, plan.units.clone(), ranks);
        let train = (train, feed);
        Ok(Self { executor, settings, plan, store, train, evaluate, steps: 0 })
    }

    /// Takes the memory, and this rank's part of the weights to start from out of `read`.
    pub fn start(&mut self, read: &ReadParam<'_>) -> Result<()> {
        self.executor.reserve()?;
        for (unit, buffers) in self.plan.buffers.iter().enumerate() {
            let into: Vec<&Held> = [&buffers.weights].into_iter().chain(&buffers.master).collect();
            self.store.fill(&mut self.executor, unit, &into, read)?;
        }
        Ok(())
    }

    /// Takes one optimizer step with this learning rate.
    pub fn step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        let run = |executor: &mut Executor<E>, script| executor.run(script);
        Ok(self.step_by(data, lr, run)?.0)
    }

    /// The same, and tells when it did what, counted from `origin`.
    pub fn step_traced(
        &mut self,
        data: &StepData<'_>,
        lr: f64,
        origin: Instant,
    ) -> Result<(StepResult, Vec<Traced>)> {
        let run = |executor: &mut Executor<E>, script| executor.run_traced(script, origin);
        let (result, timed) = self.step_by(data, lr, run)?;
        Ok((result, describe(timed, self.script(), &self.plan)))
    }

    fn step_by<T>(
        &mut self,
        data: &StepData<'_>,
        lr: f64,
        run: impl FnOnce(&mut Executor<E>, ScriptId) -> Result<T, RuntimeError>,
    ) -> Result<(StepResult, T)> {
        let scalars = Scalars { lr, step: self.steps + 1, seed: self.settings.seed };
        let (script, feed) = &mut self.train;
        feed.write(&mut self.executor, data, scalars)?;
        let told = run(&mut self.executor, *script)?;
        self.steps += 1;
        let bytes = self.settings.precision.state.size();
        let mut read = |buffer| read_scalar(&mut self.executor, *script, buffer, bytes);
        let result =
            StepResult { loss: read(self.plan.loss)?, grad_norm: read(self.plan.grad_norm)? };
        Ok((result, told))
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
        let pieces = self.param_pieces()?;
        assemble(self.store.params(), vec![pieces], self.settings.precision.state)
    }

    /// What this rank holds of the parameters, in full precision.
    pub fn param_pieces(&mut self) -> Result<Vec<Piece>> {
        let buffers = self.plan.buffers.iter();
        let buffers = buffers.map(|b| b.master.as_ref().unwrap_or(&b.weights));
        self.store.pieces(&mut self.executor, buffers)
    }

    /// The gradients of the last step by parameter name, before clipping.
    pub fn gradients(&mut self) -> Result<BTreeMap<String, hf::Tensor>> {
        let pieces = self.gradient_pieces()?;
        assemble(self.store.params(), vec![pieces], self.settings.precision.grads)
    }

    /// What this rank holds of the gradients of the last step, summed over ranks.
    pub(crate) fn gradient_pieces(&mut self) -> Result<Vec<Piece>> {
        let buffers = self.plan.buffers.iter().map(|b| &b.gradient);
        self.store.pieces(&mut self.executor, buffers)
    }

    /// The script of a step.
    pub fn script(&self) -> &Script {
        self.executor.script(self.train.0)
    }

    /// The script of an evaluation, if the session has a model to evaluate.
    pub fn evaluation(&self) -> Option<&Script> {
        self.evaluate.as_ref().map(|(script, ..)| self.executor.script(*script))
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

    /// The engine, to ask what it counted.
    pub fn engine_mut(&mut self) -> &mut E {
        self.executor.engine_mut()
    }
}
