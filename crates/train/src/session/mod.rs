//! A model in training on one or many ranks.
//!
//! [`Lowered`] lays a model on a mesh and forms its programs. Each rank ([`RankSession`]) turns them
//! and a schedule into a checked script and gives it to an executor. A [`Session`] is a crew of such
//! ranks: [`Session::step`] lets each fill its part of the step's inputs, run its script and read two
//! numbers. What a step does is all in the script.

mod compile;
mod feed;
mod forward;
mod lowered;
mod measure;
mod numbers;
mod parallel;
mod pipeline;
mod rank;
mod settings;
mod store;
mod traced;

use std::collections::BTreeMap;
use std::time::Instant;

use phalanx_comm::{Communicator, Crew, Failure, Lost, Options};
use phalanx_ir::{DType, Model, Param, Port, Program};
use phalanx_models::hf;
use phalanx_runtime::Observed;
use phalanx_script::{MemoryPlan, Moved, Route, Script, check_together, traffic};

pub use feed::{Field, StepData};
pub use forward::Forward;
pub use lowered::Lowered;
pub(crate) use numbers::encode;
pub use parallel::{Parallel, SharedStrategy};
pub use pipeline::{Order, Pipeline, Split};
pub use rank::RankSession;
pub use settings::{MemoryLimit, Over, Settings};
pub use store::{Piece, ReadParam, initial};
pub use traced::{Timetable, Trace, Traced};

use crate::error::{Error, Problem, Result};
use crate::host::{HostEngine, launcher, rank_engine};
use store::assemble;

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

/// A session of which everything is known but the weights: it takes no memory for tensors yet.
pub struct Prepared {
    crew: Crew<RankSession<HostEngine>>,
    known: Known,
}

/// What is known of a session before it runs.
struct Known {
    settings: Settings,
    params: Vec<Param>,
    /// The first rank's script; the ranks of its device do the same, each on its part.
    script: Script,
    /// Where the buffers of the largest rank lie.
    memory: MemoryPlan,
    /// FLOPs of a step over all ranks.
    flops: u64,
    /// Bytes of each rank's arena.
    arenas: Vec<usize>,
    /// What all ranks together are predicted to move in a step.
    moved: BTreeMap<Route, Moved>,
    /// The mesh, the strategies, and what they shard.
    layout: String,
    /// Who does what in which order.
    timetable: Timetable,
}

/// What one rank tells of itself.
struct OfRank {
    arena: usize,
    memory: MemoryPlan,
    moved: BTreeMap<Route, Moved>,
    flops: u64,
    script: Script,
    evaluation: Option<Script>,
}

/// FLOPs of a script's programs.
fn flops(script: &Script) -> u64 {
    let runs = script.actions.iter().filter_map(|action| action.run());
    runs.map(|run| script.programs[run.program.0].program.flops()).sum()
}

impl Prepared {
    /// Plans, compiles and loads everything, and refuses what takes more memory than it may.
    pub fn new(models: &Models, settings: Settings) -> Result<Self> {
        Self::with_options(models, settings, Options::default())
    }

    /// The same, with ranks that wait for each other as these options say.
    pub fn with_options(models: &Models, settings: Settings, options: Options) -> Result<Self> {
        let prepared = Self::load(&Lowered::new(models, settings)?, options)?;
        prepared.within_limits()
    }

    /// The same of programs that are formed already.
    pub fn of(lowered: &Lowered, options: Options) -> Result<Self> {
        Self::load(lowered, options)?.within_limits()
    }

    fn within_limits(self) -> Result<Self> {
        match self.over() {
            Some(over) => Err(Error::refused(over.problem())),
            None => Ok(self),
        }
    }

    /// Plans, compiles and loads everything, whatever memory that takes.
    pub(crate) fn load(lowered: &Lowered, options: Options) -> Result<Self> {
        let settings = &lowered.settings;
        // Senders do not wait for receivers, so a channel must have room for a step's messages.
        let depth = options.depth.max(4 * settings.microbatches * lowered.chunks());
        let depth = if lowered.is_pipeline() { depth } else { options.depth };
        let options = Options { threads_per_rank: settings.threads, depth, ..options };
        let load = |endpoint: Box<dyn Communicator>| {
            let rank = endpoint.rank();
            let engine = rank_engine(settings.threads, endpoint)?;
            RankSession::load(engine, lowered, rank)
        };
        let ranks = lowered.ranks();
        let mut crew = Crew::new(&launcher(ranks, options), load).map_err(|f| lost(f, ranks))?;
        let of_rank = |rank: usize, session: &mut RankSession<HostEngine>| {
            let script = session.script();
            Ok::<_, Error>(OfRank {
                arena: session.arena(),
                memory: session.memory().clone(),
                moved: traffic(script),
                // Programs count the work of all ranks of their mesh.
                flops: if lowered.place(rank).place == 0 { flops(script) } else { 0 },
                script: script.clone(),
                evaluation: session.evaluation().cloned(),
            })
        };
        let mut of_ranks = crew.run(of_rank).map_err(|f| lost(f, ranks))?;
        let mut moved: BTreeMap<Route, Moved> = BTreeMap::new();
        for (route, once) in of_ranks.iter().flat_map(|rank| &rank.moved) {
            let total = moved.entry(route.clone()).or_default();
            (total.calls, total.bytes) = (total.calls + once.calls, total.bytes + once.bytes);
        }
        let arenas: Vec<usize> = of_ranks.iter().map(|rank| rank.arena).collect();
        let flops = of_ranks.iter().map(|rank| rank.flops).sum();
        let evaluations = of_ranks.iter_mut().filter_map(|rank| rank.evaluation.take());
        check_together(&evaluations.collect::<Vec<_>>())?;
        let scripts: Vec<Script> =
            of_ranks.iter_mut().map(|rank| std::mem::take(&mut rank.script)).collect();
        check_together(&scripts)?;
        let script = scripts.into_iter().next().unwrap_or_default();
        let largest = of_ranks.into_iter().rev().max_by_key(|rank| rank.arena);
        let Some(OfRank { memory, .. }) = largest else { unreachable!("there is a rank") };
        let known = Known {
            settings: settings.clone(),
            params: lowered.model.params().to_vec(),
            script,
            memory,
            flops,
            arenas,
            moved,
            layout: lowered.describe(),
            timetable: Timetable::new(lowered)?,
        };
        Ok(Self { crew, known })
    }

    /// How the plan exceeds the memory that it may take, if it does.
    pub(crate) fn over(&self) -> Option<Over> {
        let Known { settings, memory, arenas, .. } = &self.known;
        let (rank, all) = (arenas.iter().copied().max().unwrap_or(0), arenas.iter().sum());
        settings.memory_limit?.over(rank, all, memory)
    }

    /// Takes the memory, and the weights to start from out of `read`: each rank its part of them.
    pub fn start(mut self, read: &ReadParam<'_>) -> Result<Session> {
        let ranks = self.crew.ranks();
        self.crew.run(|_, rank| rank.start(read)).map_err(|f| lost(f, ranks))?;
        let Self { crew, known } = self;
        Ok(Session { crew, known, steps: 0, trace_at: None, trace: None })
    }
}

/// A model in training.
pub struct Session {
    crew: Crew<RankSession<HostEngine>>,
    known: Known,
    steps: u64,
    /// The step that is to be traced, and what was found.
    trace_at: Option<u64>,
    trace: Option<Trace>,
}

impl Session {
    /// Plans, compiles and loads everything; `read` gives the weights to start from.
    pub fn new(models: &Models, settings: Settings, read: &ReadParam<'_>) -> Result<Self> {
        Prepared::new(models, settings)?.start(read)
    }

    /// Takes one optimizer step with this learning rate.
    pub fn step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        if self.trace_at == Some(self.steps + 1) {
            return self.traced_step(data, lr);
        }
        let results = self.on_ranks(|_, rank| rank.step(data, lr))?;
        self.steps += 1;
        Ok(results[0])
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

    fn traced_step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        let origin = Instant::now();
        let results = self.on_ranks(|_, rank| rank.step_traced(data, lr, origin))?;
        self.steps += 1;
        let first = results[0].0;
        let ranks = results.into_iter().map(|(_, actions)| actions).collect();
        let timetable = self.known.timetable.clone();
        self.trace = Some(Trace { step: self.steps, timetable, ranks });
        Ok(first)
    }

    /// The mean loss of a batch under the present weights, which stay as they are.
    pub fn evaluate(&mut self, data: &StepData<'_>) -> Result<f64> {
        Ok(self.on_ranks(|_, rank| rank.evaluate(data))?[0])
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.crew.ranks()
    }

    /// The parameters by name, in full precision: masters where there are some.
    pub fn params(&mut self) -> Result<BTreeMap<String, hf::Tensor>> {
        let dtype = self.known.settings.precision.state;
        self.assembled(RankSession::param_pieces, dtype)
    }

    /// The gradients of the last step by parameter name, before clipping.
    pub fn gradients(&mut self) -> Result<BTreeMap<String, hf::Tensor>> {
        let dtype = self.known.settings.precision.grads;
        self.assembled(RankSession::gradient_pieces, dtype)
    }

    /// Settings that keep numbers finite for longer, and that are not on yet.
    pub(crate) fn remedies(&self) -> Vec<&'static str> {
        let narrow = |port: &Port, program: &Program| program.ty(port.value).dtype == DType::Bf16;
        let mut programs = self.script().programs.iter().map(|entry| &entry.program);
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

    /// The script of the first rank's step; the ranks of its device do the same, each on its part.
    pub fn script(&self) -> &Script {
        &self.known.script
    }

    /// Where the buffers of the largest rank's script lie, and what they cost.
    pub fn memory(&self) -> &MemoryPlan {
        &self.known.memory
    }

    /// Bytes of all ranks' arenas, which training and evaluation share.
    pub fn arena(&self) -> usize {
        self.known.arenas.iter().sum()
    }

    /// Bytes of the largest rank's arena.
    pub fn rank_arena(&self) -> usize {
        self.known.arenas.iter().copied().max().unwrap_or(0)
    }

    /// What all ranks together will move in a step, as the types of their scripts tell.
    pub fn moved(&self) -> &BTreeMap<Route, Moved> {
        &self.known.moved
    }

    /// The ranks and how they divide the work, in one line.
    pub fn layout(&self) -> &str {
        &self.known.layout
    }

    /// By rank: runs a step twice under observation, on the batch of the last step, and tells which
    /// bytes it wrote. Weights and state are put back afterwards.
    pub fn observe(&mut self) -> Result<Vec<Observed>> {
        self.on_ranks(|_, rank| rank.observe())
    }

    /// FLOPs of the programs of one step over all ranks, multiplications and additions counted apart.
    pub fn flops_per_step(&self) -> u64 {
        self.known.flops
    }

    /// Does something on every rank, and gives what each returns.
    pub fn on_ranks<T: Send>(
        &mut self,
        work: impl Fn(usize, &mut RankSession<HostEngine>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let ranks = self.crew.ranks();
        self.crew.run(work).map_err(|failure| lost(failure, ranks))
    }

    fn assembled(
        &mut self,
        pieces: impl Fn(&mut RankSession<HostEngine>) -> Result<Vec<Piece>> + Sync,
        dtype: DType,
    ) -> Result<BTreeMap<String, hf::Tensor>> {
        let ranks = self.on_ranks(|_, rank| pieces(rank))?;
        assemble(&self.known.params, ranks, dtype)
    }
}

/// What is told when a rank could not go on: its own error, and on which of several ranks it was.
pub(crate) fn lost(lost: impl Into<Lost<Error>>, ranks: usize) -> Error {
    let lost = lost.into();
    let Failure { rank, message } = lost.failure;
    let place = format!("on rank {rank} of {ranks}");
    match lost.error {
        Some(error) if ranks == 1 => error,
        Some(error) => error.because(place),
        None if ranks == 1 => Error::failed(Problem::new(message.to_string())),
        None => Error::failed(Problem::new(message.to_string()).because(place)),
    }
}
