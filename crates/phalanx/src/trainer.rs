//! The shortest way from a model and data to trained weights.

mod ranks;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_autodiff::Recompute;
use phalanx_config::{CpuUnits, DeviceKind};
use phalanx_error::Result;
use phalanx_ir::{DType, IrError, Model, Role};
use phalanx_models::Architecture;
use phalanx_script::{EveryStep, LossScaling, Optimizer, Precision};
use phalanx_session::{BatchShare, MemoryLimit, Parallel, Settings, job};
use phalanx_train::steps::TrainedStep;

use crate::axes::check_axes;
use crate::checkpoints::CheckpointPlan;
use crate::data_source::Data;
use crate::evaluate::Evaluation;
use crate::forms::{Asked, Ready, Subject, Use};
use crate::mistake::{Mistake, check_clip, check_optimizer, check_rate};
use crate::ranks_as::RanksAs;
use crate::replicas::LocalSgd;
use crate::report::Report;
use crate::stepper::Stepper;
use crate::training::{Hooks, Training, Validation};
use crate::words::in_own_words;

/// Trains a model. Everything but the data has a default.
///
/// Each method sets one thing. Then [`Trainer::run`] trains and reports; [`Trainer::build`] gives a
/// [`Training`], which can also evaluate, predict, stop and go on; and [`Trainer::stepper`] gives a
/// [`Stepper`], for a loop of your own. What cannot work is refused by these three, with a
/// [`Mistake`] as its cause.
///
/// ```
/// use phalanx::{Mlp, Table, Trainer};
///
/// let data = Table::new(4).input("x", vec![0.0, 1.0, 2.0, 3.0]).target("y", vec![1.0, 3.0, 5.0, 7.0]);
/// let report = Trainer::new(Mlp::regression(1, [], 1)).data(data).batch(4).lr(0.1).steps(50).run()?;
/// assert!(report.last_loss() < report.first_loss());
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct Trainer<'a> {
    subject: Subject,
    data: Option<Data>,
    start: Option<PathBuf>,
    optimizer: Optimizer,
    clip: Option<f64>,
    steps: usize,
    asked: Asked,
    recompute: Recompute,
    seed: u64,
    threads: Option<usize>,
    memory_limit: Option<u64>,
    parallel: Parallel,
    local_sgd: Option<LocalSgd>,
    ranks: Option<RanksAs>,
    mesh_mistake: Option<IrError>,
    validation: Option<Validation>,
    checkpoints: CheckpointPlan,
    hooks: Hooks<'a>,
}

/// What a callback may return: nothing, or whether to go on.
///
/// [`ControlFlow::Break`] ends [`Training::fit`] after this step; what was trained is kept.
///
/// ```
/// use std::ops::ControlFlow;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.on_step(|taken| match taken.result.loss < 0.1 {
///     true => ControlFlow::Break(()),
///     false => ControlFlow::Continue(()),
/// })
/// # }
/// ```
pub trait Verdict {
    /// Whether to go on.
    fn flow(self) -> ControlFlow<()>;
}

impl Verdict for () {
    fn flow(self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

impl Verdict for ControlFlow<()> {
    fn flow(self) -> ControlFlow<()> {
        self
    }
}

impl<'a> Trainer<'a> {
    /// A trainer of an architecture, which is written for any batch shape: [`Mlp`](crate::Mlp),
    /// [`Gpt`](crate::Gpt), [`Llama`](crate::Llama) or your own.
    pub fn new(architecture: impl Architecture + 'static) -> Self {
        Self::of(Subject::Architecture(Box::new(architecture)))
    }

    /// A trainer of a model that was written for one micro-batch shape, with a
    /// [`Builder`](crate::Builder). It is evaluated as it is trained, with its dropout.
    pub fn of_model(model: Model) -> Self {
        Self::of(Subject::Model(model))
    }

    fn of(subject: Subject) -> Self {
        Self {
            subject,
            data: None,
            start: None,
            optimizer: Optimizer::adamw(),
            clip: Some(1.0),
            steps: 100,
            asked: Asked {
                batch: None,
                seq_len: 128,
                microbatches: 1,
                replicas: 1,
                compute: DType::F32,
            },
            recompute: Recompute::None,
            seed: 0,
            threads: None,
            memory_limit: None,
            parallel: Parallel::default(),
            local_sgd: None,
            ranks: None,
            mesh_mistake: None,
            validation: None,
            checkpoints: CheckpointPlan::default(),
            hooks: Hooks::default(),
        }
    }

    /// What to train on: a corpus, or a [`Table`](crate::Table).
    pub fn data(mut self, data: impl Into<Data>) -> Self {
        self.data = Some(data.into());
        self
    }

    /// Weights to start from instead of random ones: a file that [`Training::save`] or
    /// [`Report::save`] wrote, or a Hugging Face folder. Each rank reads only its part.
    pub fn start_from(mut self, path: impl Into<PathBuf>) -> Self {
        self.start = Some(path.into());
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
        self.hooks.rate = Box::new(rate);
        self
    }

    /// The largest gradient norm; `None` for no limit. Default: 1.
    pub fn clip(mut self, clip: Option<f64>) -> Self {
        self.clip = clip;
        self
    }

    /// How many steps [`Trainer::run`] takes. Default: 100.
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// Samples of each step. Default: 32, or one micro-batch with [`Trainer::of_model`].
    pub fn batch(mut self, samples: usize) -> Self {
        self.asked.batch = Some(samples);
        self
    }

    /// Tokens of each sample of an architecture. Default: 128.
    pub fn seq_len(mut self, tokens: usize) -> Self {
        self.asked.seq_len = tokens;
        self
    }

    /// Micro-batches of each batch of an architecture, whose gradients are summed before the update.
    /// Default: 1. With [`Trainer::of_model`] the model sets their size.
    pub fn microbatches(mut self, parts: usize) -> Self {
        self.asked.microbatches = parts;
        self
    }

    /// The element type that an architecture computes in. Default: `f32`.
    pub fn compute(mut self, dtype: DType) -> Self {
        self.asked.compute = dtype;
        self
    }

    /// What the backward pass recomputes instead of keeping it. Default: nothing.
    pub fn recompute(mut self, policy: Recompute) -> Self {
        self.recompute = policy;
        self
    }

    /// The seed of initial weights, the order of samples and dropout. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Threads of each rank. Default: the ranks share the cores.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Bytes that the plan of each rank may take. Default: what this machine has free, for all ranks.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Evaluates on `data` after every `steps` steps and tells [`Trainer::on_evaluate`].
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use phalanx::{Mlp, Table, Trainer};
    ///
    /// let line = |from: f32| {
    ///     let x: Vec<f32> = (0..8).map(|i| from + i as f32 / 8.0).collect();
    ///     let y = x.iter().map(|x| 2.0 * x).collect();
    ///     Table::new(8).input("x", x).target("y", y)
    /// };
    /// let report = Trainer::new(Mlp::regression(1, [], 1))
    ///     .data(line(0.0))
    ///     .batch(8)
    ///     .lr(0.1)
    ///     .steps(1000)
    ///     .evaluate_every(10, line(0.5))
    ///     .on_evaluate(|held_out| match held_out.loss < 1e-3 {
    ///         true => ControlFlow::Break(()), // good enough: stop early
    ///         false => ControlFlow::Continue(()),
    ///     })
    ///     .run()?;
    /// assert!(report.losses.len() < 1000 && report.losses.len() % 10 == 0);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn evaluate_every(mut self, steps: usize, data: impl Into<Data>) -> Self {
        self.validation = Some(Validation { every: steps, data: data.into() });
        self
    }

    /// Saves the whole state after every `steps` steps, and at the end of [`Training::fit`], in
    /// `folder/checkpoints/step-00000120`; the newest three are kept. A checkpoint is written beside the
    /// next step, and can be read by any layout.
    ///
    /// ```
    /// use phalanx::{Ddp, Mlp, Table, Trainer};
    ///
    /// let x: Vec<f32> = (0..16).map(|i| i as f32 / 8.0 - 1.0).collect();
    /// let y = x.iter().map(|x| 3.0 * x - 1.0).collect();
    /// let data = Table::new(16).input("x", x).target("y", y);
    /// let folder = std::env::temp_dir().join(format!("phalanx-doc-{}", std::process::id()));
    /// let trainer = || Trainer::new(Mlp::regression(1, [8], 1)).data(&data).batch(8).threads(1);
    ///
    /// let whole = trainer().steps(20).run()?;
    /// trainer().steps(12).checkpoint_every(5, &folder).run()?;
    /// // Another process, later: it goes on after step 12, with the same bits.
    /// let rest = trainer().steps(20).resume(&folder).run()?;
    /// assert_eq!(rest.losses, whole.losses[12..]);
    /// // Two ranks that share the state go on, too, with the same numbers.
    /// let shared = trainer().mesh("dp=2").strategy(Ddp::default()).steps(20).resume(&folder).run()?;
    /// assert!((shared.last_loss() - whole.last_loss()).abs() < 1e-5);
    /// # std::fs::remove_dir_all(&folder).ok();
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn checkpoint_every(mut self, steps: usize, folder: impl Into<PathBuf>) -> Self {
        self.checkpoints.every = Some((steps, folder.into()));
        self
    }

    /// Goes on from a checkpoint, of any layout, instead of beginning: in the folder that
    /// [`Trainer::checkpoint_every`] was given (its newest whole one), in the folder of a run, or in the
    /// folder of one checkpoint. Steps go on with their numbers, and [`Trainer::steps`] is still the
    /// total that [`Trainer::run`] takes.
    ///
    /// `"latest"` is the newest one of the own [`Trainer::checkpoint_every`] folder; if there is none yet,
    /// the training begins. So a program that is simply started again goes on: by hand, by torchrun or
    /// Slurm, or by `phalanx launch --exec`, which then does so by itself when a rank is lost.
    pub fn resume(mut self, path: impl Into<PathBuf>) -> Self {
        self.checkpoints.resume = Some(path.into());
        self
    }

    /// Calls `tell` after each step. It may return [`ControlFlow::Break`] to stop.
    pub fn on_step<V: Verdict>(mut self, mut tell: impl FnMut(&TrainedStep) -> V + 'a) -> Self {
        self.hooks.on_step = Box::new(move |taken| tell(taken).flow());
        self
    }

    /// Calls `tell` after each evaluation that [`Trainer::evaluate_every`] asks for. It may return
    /// [`ControlFlow::Break`] to stop.
    pub fn on_evaluate<V: Verdict>(mut self, mut tell: impl FnMut(&Evaluation) -> V + 'a) -> Self {
        self.hooks.on_evaluate = Box::new(move |held_out| tell(held_out).flow());
        self
    }

    /// Trains, and reports losses and weights.
    pub fn run(self) -> Result<Report> {
        if self.data.is_none() {
            return Err(Mistake::NoData.into());
        }
        let used = if self.validation.is_some() { Use::Everything } else { Use::Train };
        let steps = self.steps;
        let mut training = self.prepare(used)?;
        // Of a training that goes on, some were taken before.
        training.fit(steps.saturating_sub(training.steps()))?;
        Ok(training.into_report())
    }

    /// Plans, compiles and starts everything, and takes no step yet. Without data it can evaluate,
    /// predict, load and save.
    pub fn build(self) -> Result<Training<'a>> {
        self.prepare(Use::Everything)
    }

    /// Everything for a training loop of your own; see [`Stepper`].
    pub fn stepper(self) -> Result<Stepper<'a>> {
        Ok(Stepper::new(self.build()?))
    }

    fn prepare(mut self, used: Use) -> Result<Training<'a>> {
        if let Some(error) = self.mesh_mistake.take() {
            return Err(error.into());
        }
        check_clip(self.clip)?;
        check_optimizer(&self.optimizer)?;
        check_rate(1, (self.hooks.rate)(1))?;
        if self.validation.as_ref().is_some_and(|own| own.every == 0) {
            return Err(Mistake::EvaluateEveryZero.into());
        }
        self.checkpoints.check()?;
        if let Some(asked) = self.local_sgd {
            self.parallel.replicas = asked.on(&self.parallel, self.steps, self.asked.compute)?;
            self.asked.replicas = self.parallel.replica_count();
        }
        let ready = self.subject.ready(self.asked, used).map_err(in_own_words)?;
        check_axes(&self.parallel, &ready.models.train)?;
        let settings = self.settings(&ready);
        RanksAs::begin(self.ranks, settings.parallel.ranks())?;
        let Self { data, start, hooks, validation, checkpoints, .. } = self;
        let training = Training::new(ready, settings, start.as_deref(), checkpoints, hooks);
        training.and_then(|training| training.with_data(data, validation)).map_err(in_own_words)
    }

    fn settings(&self, ready: &Ready) -> Settings {
        let programs = ready.models.train.segments().iter();
        let mut weights = programs.flat_map(|p| p.inputs_with(Role::Param).map(|w| p.ty(w.value)));
        let weights = weights.next().map_or(self.asked.compute, |ty| ty.dtype);
        let state = weights.accumulator();
        Settings {
            precision: Precision { weights: state, grads: state, state, split: false },
            optimizer: self.optimizer,
            clip: self.clip,
            scaling: (self.asked.compute == DType::F16).then(LossScaling::dynamic),
            microbatches: ready.microbatches,
            recompute: self.recompute,
            seed: self.seed,
            memory_limit: match self.memory_limit {
                Some(bytes) => Some(MemoryLimit::Asked(bytes)),
                None => MemoryLimit::of_machine(),
            },
            parallel: self.parallel.clone(),
            device: DeviceKind::Cpu,
            tf32: false,
            units: CpuUnits::Auto,
            threads: self.threads.unwrap_or_else(|| default_threads(self.parallel.ranks())).max(1),
            controller: match self.parallel.replicas {
                Some(replicas) => Arc::new(replicas),
                None => Arc::new(EveryStep),
            },
            share: BatchShare::WHOLE,
            saves: self.checkpoints.every.is_some(),
        }
    }
}

/// The ranks of a host share its physical cores.
fn default_threads(ranks: usize) -> usize {
    (job::cores_here() / job::ranks_here(ranks).max(1)).max(1)
}
