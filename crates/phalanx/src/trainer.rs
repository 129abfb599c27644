//! The shortest way from a model and data to trained weights.

use std::sync::Arc;

use phalanx_autodiff::Recompute;
use phalanx_error::{Error, Problem, Result};
use phalanx_ir::{DType, IrError, Mesh, Model, Role};
use phalanx_models::{Architecture, BatchShape};
use phalanx_script::{Optimizer, Precision};
use phalanx_session::{
    MemoryLimit, Models, Parallel, PipelineOrder, Session, Settings, StageSplit, initial,
};
use phalanx_spmd::Strategy;
use phalanx_train::steps::{TrainedStep, take_steps};

use crate::data_source::Data;
use crate::report::Report;

/// Trains a model. Everything but the data has a default.
pub struct Trainer<'a> {
    subject: Subject,
    data: Option<Data>,
    optimizer: Optimizer,
    rate: Box<dyn Fn(usize) -> f64 + 'a>,
    clip: Option<f64>,
    steps: usize,
    batch: Option<usize>,
    seq_len: usize,
    microbatches: usize,
    compute: DType,
    recompute: Recompute,
    seed: u64,
    threads: Option<usize>,
    parallel: Parallel,
    mistake: Option<IrError>,
    on_step: Box<dyn FnMut(&TrainedStep) + 'a>,
}

enum Subject {
    Architecture(Box<dyn Architecture>),
    Model(Model),
}

impl<'a> Trainer<'a> {
    /// A trainer of an architecture, which is written for any batch shape.
    pub fn new(architecture: impl Architecture + 'static) -> Self {
        Self::of(Subject::Architecture(Box::new(architecture)))
    }

    /// A trainer of a model that was written for one micro-batch shape.
    pub fn of_model(model: Model) -> Self {
        Self::of(Subject::Model(model))
    }

    fn of(subject: Subject) -> Self {
        Self {
            subject,
            data: None,
            optimizer: Optimizer::adamw(),
            rate: Box::new(|_| 3e-4),
            clip: Some(1.0),
            steps: 100,
            batch: None,
            seq_len: 128,
            microbatches: 1,
            compute: DType::F32,
            recompute: Recompute::None,
            seed: 0,
            threads: None,
            parallel: Parallel::default(),
            mistake: None,
            on_step: Box::new(|_| ()),
        }
    }

    /// What to train on: a corpus, or a [`Table`](crate::Table).
    pub fn data(mut self, data: impl Into<Data>) -> Self {
        self.data = Some(data.into());
        self
    }

    /// The update rule. Default: AdamW.
    pub fn optimizer(mut self, optimizer: Optimizer) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// A constant learning rate. Default: 3e-4.
    pub fn lr(self, lr: f64) -> Self {
        self.rate(move |_| lr)
    }

    /// The learning rate of each step, counted from 1.
    pub fn rate(mut self, rate: impl Fn(usize) -> f64 + 'a) -> Self {
        self.rate = Box::new(rate);
        self
    }

    /// The largest gradient norm; `None` for no limit. Default: 1.
    pub fn clip(mut self, clip: Option<f64>) -> Self {
        self.clip = clip;
        self
    }

    /// How many steps. Default: 100.
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// Samples of each step. Default: 32, or one micro-batch with [`Trainer::of_model`].
    pub fn batch(mut self, samples: usize) -> Self {
        self.batch = Some(samples);
        self
    }

    /// Tokens of each sample of an architecture. Default: 128.
    pub fn seq_len(mut self, tokens: usize) -> Self {
        self.seq_len = tokens;
        self
    }

    /// Micro-batches of each batch of an architecture. With [`Trainer::of_model`] the model sets
    /// their size.
    pub fn microbatches(mut self, parts: usize) -> Self {
        self.microbatches = parts;
        self
    }

    /// The element type that an architecture computes in. Default: `f32`.
    pub fn compute(mut self, dtype: DType) -> Self {
        self.compute = dtype;
        self
    }

    /// What the backward pass recomputes instead of keeping it.
    pub fn recompute(mut self, policy: Recompute) -> Self {
        self.recompute = policy;
        self
    }

    /// The seed of initial weights, the order of samples and dropout.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Threads of each rank. Default: the ranks share the cores.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// The ranks and how they are arranged: `dp=2 tp=2` are four ranks, in two pairs that share the
    /// tensors. The stages of a pipeline lie along an axis `pp`. Default: one rank.
    pub fn mesh(mut self, mesh: &str) -> Self {
        if let Some(mesh) = self.parsed(mesh) {
            self.parallel.mesh = mesh;
        }
        self
    }

    /// The order in which the stages of a pipeline take micro-batches: one of the [`Named`]
    /// schedules, or your own [`Schedule`]. Default: 1F1B.
    ///
    /// ```
    /// use phalanx::ir::ops::UnaryKind;
    /// use phalanx::models::Mlp;
    /// use phalanx::pipeline::{Placement, b, fwd, w, weave};
    /// use phalanx::{NamedSchedule, Order, Schedule, Table, Trainer};
    ///
    /// let loss = |mesh: &str, order: Order| {
    ///     let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8, 8], 1) };
    ///     let (x, y) = (vec![-1.0, 0.0, 1.0, 2.0], vec![1.0, 0.0, 1.0, 4.0]);
    ///     let trainer = Trainer::new(model).data(Table::new(4).input("x", x).target("y", y));
    ///     let trainer = trainer.batch(4).microbatches(4).lr(1e-2).steps(5).threads(1);
    ///     Ok::<f64, phalanx::Error>(trainer.mesh(mesh).schedule(order).run()?.last_loss())
    /// };
    /// let one = loss("pp=1", NamedSchedule::OneFOneB.into())?;
    /// // All forwards, then the gradients of inputs, each followed by those of the weights.
    /// let own = Schedule::new("own", 4, Placement::looped(2, 1)?, |_| {
    ///     fwd(0..4).then(weave([b(0..4), w(0..4)]))
    /// })?;
    /// for many in [loss("pp=2", NamedSchedule::ZbH1.into())?, loss("pp=2", own.into())?] {
    ///     assert!((many - one).abs() < 1e-5 * one);
    /// }
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// [`Named`]: crate::Named
    /// [`Schedule`]: crate::Schedule
    pub fn schedule(mut self, order: impl Into<PipelineOrder>) -> Self {
        self.parallel.pipeline.order = order.into();
        self
    }

    /// Chunks of layers that each stage group of a pipeline holds. Default: as many as its schedule
    /// usually has.
    pub fn chunks(mut self, chunks: usize) -> Self {
        self.parallel.pipeline.chunks = Some(chunks);
        self
    }

    /// Which layers the stages of a pipeline get. Default: divided by FLOPs.
    pub fn split(mut self, split: StageSplit) -> Self {
        self.parallel.pipeline.split = split;
        self
    }

    /// Lets each stage of a pipeline keep only its input and recompute its forward before the
    /// backward, as in GPipe.
    pub fn rematerialise(mut self) -> Self {
        self.parallel.pipeline.rematerialise = true;
        self
    }

    /// The stages of a pipeline with a mesh each, where they differ: `["tp=2", "tp=4"]` are two
    /// stages on six ranks. They replace [`Trainer::mesh`].
    pub fn stage_meshes<'m>(mut self, meshes: impl IntoIterator<Item = &'m str>) -> Self {
        let meshes = meshes.into_iter().filter_map(|mesh| self.parsed(mesh)).collect();
        self.parallel.pipeline.meshes = meshes;
        self
    }

    /// A mesh from its text; a mistake is reported when the trainer runs.
    fn parsed(&mut self, mesh: &str) -> Option<Mesh> {
        match mesh.parse() {
            Ok(mesh) => Some(mesh),
            Err(error) => {
                self.mistake.get_or_insert(error);
                None
            }
        }
    }

    /// Divides the work among the ranks of the mesh. Strategies compose, in any order: each uses
    /// its own axis.
    ///
    /// ```
    /// use phalanx::ir::ops::UnaryKind;
    /// use phalanx::models::Mlp;
    /// use phalanx::{Ddp, Fsdp, Megatron, Strategy, Table, Trainer};
    ///
    /// fn loss(mesh: &str, strategy: impl Strategy + Send + Sync + 'static) -> phalanx::Result<f64> {
    ///     let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8], 1) };
    ///     let (x, y) = (vec![-1.0, 0.0, 1.0, 2.0], vec![1.0, 0.0, 1.0, 4.0]);
    ///     let trainer = Trainer::new(model).data(Table::new(4).input("x", x).target("y", y));
    ///     let trainer = trainer.batch(4).lr(1e-2).steps(5).threads(1);
    ///     Ok(trainer.mesh(mesh).strategy(strategy).strategy(Megatron::default()).run()?.last_loss())
    /// }
    /// let one = loss("dp=1", Ddp::default())?;
    /// for many in [
    ///     loss("dp=2", Ddp::default())?,
    ///     loss("dp=2 tp=2", Fsdp { reshard_after_forward: false, ..Fsdp::default() })?,
    /// ] {
    ///     assert!((many - one).abs() < 1e-5 * one);
    /// }
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn strategy(mut self, strategy: impl Strategy + Send + Sync + 'static) -> Self {
        self.parallel.strategies.push(Arc::new(strategy));
        self
    }

    /// Calls `tell` after each step.
    pub fn on_step(mut self, tell: impl FnMut(&TrainedStep) + 'a) -> Self {
        self.on_step = Box::new(tell);
        self
    }

    /// Trains.
    pub fn run(mut self) -> Result<Report> {
        if let Some(error) = self.mistake.take() {
            return Err(error.into());
        }
        let Some(data) = self.data.take() else {
            let problem = Problem::new("there is nothing to train on");
            return Err(Error::refused(problem.fix("call Trainer::data")));
        };
        let ready = self.prepare()?;
        let mut batches = data.open(self.seed, ready.batch, ready.seq_len, ready.microbatches)?;
        let settings = self.settings(&ready);
        let models = Models { train: ready.model, evaluate: None };
        let mut session = Session::new(&models, settings, &initial(self.seed))?;
        let mut losses = Vec::with_capacity(self.steps);
        let on_step = &mut self.on_step;
        let observe = |_: &mut Session, taken: TrainedStep| {
            losses.push(taken.result.loss);
            on_step(&taken);
            Ok(())
        };
        take_steps(&mut session, &mut *batches, self.steps, &self.rate, observe)?;
        Ok(Report::new(losses, session))
    }

    /// The model with the sizes that follow from it.
    fn prepare(&mut self) -> Result<Ready> {
        let model = match &self.subject {
            Subject::Model(model) => model.clone(),
            Subject::Architecture(architecture) => {
                let (batch, parts) = (self.batch.unwrap_or(32), self.microbatches);
                if parts == 0 || batch % parts != 0 {
                    return Err(uneven(batch, &format!("{parts} micro-batches")));
                }
                let shape = BatchShape { batch: batch / parts, seq: self.seq_len };
                architecture.model(shape, self.compute)?
            }
        };
        let rows = (model.segments().iter())
            .flat_map(|p| p.inputs_with(Role::Data).map(|port| p.ty(port.value)))
            .map(|ty| (ty.shape.first().copied(), ty.shape.get(1).copied()))
            .next();
        let Some((Some(rows), seq_len)) = rows else {
            let problem = Problem::new(format!("model {} reads no data", model.name));
            return Err(Error::refused(problem.fix("declare a port with Builder::data")));
        };
        let batch = match &self.subject {
            Subject::Model(_) => self.batch.unwrap_or(rows),
            Subject::Architecture(_) => self.batch.unwrap_or(32),
        };
        if batch == 0 || batch % rows != 0 {
            return Err(uneven(batch, &format!("micro-batches of {rows} samples")));
        }
        Ok(Ready { model, batch, seq_len: seq_len.unwrap_or(1), microbatches: batch / rows })
    }

    fn settings(&self, ready: &Ready) -> Settings {
        let programs = ready.model.segments().iter();
        let mut weights = programs.flat_map(|p| p.inputs_with(Role::Param).map(|w| p.ty(w.value)));
        let weights = weights.next().map_or(self.compute, |ty| ty.dtype);
        let state = weights.accumulator();
        Settings {
            precision: Precision { weights: state, grads: state, state },
            optimizer: self.optimizer,
            clip: self.clip,
            microbatches: ready.microbatches,
            recompute: self.recompute,
            seed: self.seed,
            memory_limit: MemoryLimit::of_machine(),
            parallel: self.parallel.clone(),
            threads: self.threads.unwrap_or_else(|| default_threads(self.parallel.ranks())),
            controller: Arc::new(phalanx_script::EveryStep),
        }
    }
}

struct Ready {
    model: Model,
    batch: usize,
    seq_len: usize,
    microbatches: usize,
}

/// The ranks share the cores.
fn default_threads(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (cores / ranks.max(1)).max(1)
}

fn uneven(batch: usize, parts: &str) -> Error {
    Error::refused(
        Problem::new(format!("a batch of {batch} samples can't be cut into {parts}"))
            .fix("choose a batch size that divides evenly"),
    )
}
