//! How a trainer arranges its ranks, and how they divide the work.

use std::sync::Arc;

use phalanx_ir::Mesh;
use phalanx_session::{PipelineOrder, StageSplit};
use phalanx_spmd::Strategy;

use super::Trainer;
use crate::ranks_as::RanksAs;
use crate::replicas::LocalSgd;

impl Trainer<'_> {
    /// The ranks and how they are arranged: `dp=2 tp=2` are four ranks, in two pairs that share the
    /// tensors. The stages of a pipeline lie along an axis `pp`. Default: one rank.
    ///
    /// Every axis of more than one rank must be used: by a strategy, by an annotation of the model,
    /// or by the pipeline.
    pub fn mesh(mut self, mesh: &str) -> Self {
        if let Some(mesh) = self.parsed(mesh) {
            self.parallel.mesh = mesh;
        }
        self
    }

    /// What the ranks of the mesh are. Default: threads of this process; or, if it was started as one
    /// of several processes, those.
    ///
    /// With [`Processes(n)`](RanksAs::Processes) the program starts itself once for each rank, and the
    /// process that did so ends with them: what follows [`Trainer::run`], [`Trainer::build`] or
    /// [`Trainer::stepper`] happens in the processes of ranks, in each of them. All have the same
    /// losses and weights; [`is_first`](crate::is_first) tells which one should report.
    ///
    /// ```no_run
    /// use phalanx::{Ddp, Mlp, Processes, Table, Trainer};
    ///
    /// let data = Table::new(4).input("x", vec![0.0, 1.0, 2.0, 3.0]).target("y", vec![1.0, 3.0, 5.0, 7.0]);
    /// let trainer = Trainer::new(Mlp::regression(1, [], 1)).data(data).batch(4).lr(0.1);
    /// let report = trainer.mesh("dp=2").strategy(Ddp::default()).ranks(Processes(2)).run()?;
    /// if phalanx::is_first() {
    ///     println!("loss {}", report.last_loss());
    /// }
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn ranks(mut self, ranks: RanksAs) -> Self {
        self.ranks = Some(ranks);
        self
    }

    /// The order in which the stages of a pipeline take micro-batches: one of the [named](crate::NamedSchedule)
    /// schedules, or your own [`Schedule`]. Default: 1F1B.
    ///
    /// ```
    /// use phalanx::UnaryKind;
    /// use phalanx::Mlp;
    /// use phalanx::pipeline::{Placement, b, fwd, w, weave};
    /// use phalanx::{NamedSchedule, PipelineOrder, Schedule, Table, Trainer};
    ///
    /// let loss = |mesh: &str, order: PipelineOrder| {
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

    /// How many stage groups hold each stage of PipeDream, and take micro-batches in turn. The axis `pp` of the mesh has all
    /// of them: `pp=4` for `[2, 1, 1]`.
    pub fn holders(mut self, holders: impl Into<Vec<usize>>) -> Self {
        self.parallel.pipeline.holders = holders.into();
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
                self.mesh_mistake.get_or_insert(error);
                None
            }
        }
    }

    /// Divides the work among the ranks of the mesh. Strategies compose, in any order: each uses
    /// its own axis, which the mesh must have.
    ///
    /// ```
    /// use phalanx::UnaryKind;
    /// use phalanx::Mlp;
    /// use phalanx::{Ddp, Fsdp, Megatron, Strategy, Table, Trainer};
    ///
    /// fn loss(mesh: &str, strategy: impl Strategy + Send + Sync + 'static) -> phalanx::Result<f64> {
    ///     let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [8], 1) };
    ///     let (x, y) = (vec![-1.0, 0.0, 1.0, 2.0], vec![1.0, 0.0, 1.0, 4.0]);
    ///     let trainer = Trainer::new(model).data(Table::new(4).input("x", x).target("y", y));
    ///     let trainer = trainer.batch(4).lr(1e-2).steps(5).threads(1);
    ///     Ok(trainer.mesh(mesh).strategy(strategy).strategy(Megatron::default()).run()?.last_loss())
    /// }
    /// let one = loss("dp=1 tp=1", Ddp::default())?;
    /// for many in [
    ///     loss("dp=2 tp=1", Ddp::default())?,
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

    /// Lets the ranks along the axis `dp` be replicas that train by themselves, each on its share of the
    /// batch, and take the mean of their weights from time to time. Gradients are clipped in each
    /// replica by itself; losses are means over replicas.
    ///
    /// ```
    /// use phalanx::{LocalSgd, Mlp, Optimizer, Table, Trainer};
    ///
    /// let loss = |mesh: &str, every: usize| {
    ///     let (x, y) = (vec![-1.0, 0.0, 1.0, 2.0], vec![-1.0, 1.0, 3.0, 5.0]);
    ///     let trainer = Trainer::new(Mlp::regression(1, [], 1)).batch(4).lr(1e-2).steps(6).threads(1);
    ///     let trainer = trainer.optimizer(Optimizer::sgd(0.0)).clip(None).mesh(mesh);
    ///     let trainer = trainer.data(Table::new(4).input("x", x).target("y", y));
    ///     trainer.local_sgd(LocalSgd { every, ..LocalSgd::default() }).run().map(|r| r.last_loss())
    /// };
    /// // A mean after every step of plain gradient descent is data parallelism.
    /// let (one, always) = (loss("dp=1", 1)?, loss("dp=2", 1)?);
    /// assert!((always - one).abs() < 1e-5 * one);
    /// assert!(loss("dp=2", 3)? < 2.0 * one);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn local_sgd(mut self, how: LocalSgd) -> Self {
        self.local_sgd = Some(how);
        self
    }
}
