//! How a session's ranks are arranged, and the strategies that divide the work among them.

use std::fmt;
use std::sync::Arc;

use phalanx_ir::{Axis, Mesh, Model, Order};
use phalanx_script::{ExpertPolicy, Tutel};
use phalanx_spmd::strategies::{
    AllGatherKv, Automatic, Cube, Cut, DataParallel, Ddp, ExpertExchange, ExpertParallel, Fsdp,
    Gspmd, Megatron, Optimus, Ring, RingSelfAttention, Sequence, TensorPlan, Ulysses, Zero,
};
use phalanx_spmd::{Costs, Partition, Strategy};

use super::pipeline::Pipeline;
use super::replicas::Replicas;
use phalanx_config::{
    CommPriority, CpKind, CpOrder, ExchangeKind, LayoutKind, ModelKind, ParallelAxis,
    PlacementKind, PolicyKind, SyncKind, SyncMomentum, TpKind, ZeroStage,
};
use phalanx_error::Result;

/// How a convolutional network is split where nobody says how: the first convolution and the first fully
/// connected layer by what they give, those after them by what they read, with one sum after each pair.
pub fn channels_plan() -> TensorPlan {
    let plan = TensorPlan::new("tp").columns("conv1.*").rows("conv2.*");
    plan.columns("fc1.*").rows("fc2.*")
}

/// How weights are split where images are split by their height ([`Sequence`]): features are places first,
/// so what a rank has of an image goes with some rows of the first fully connected layer.
pub fn heights_plan() -> TensorPlan {
    TensorPlan::new("tp").rows("fc1.weight")
}

/// A strategy that several threads may read.
pub type SharedStrategy = Arc<dyn Strategy + Send + Sync>;

/// A mesh of ranks and the strategies on it.
#[derive(Clone, Default)]
pub struct Parallel {
    /// The mesh; one rank by default. The stage groups of a pipeline lie along its axis `pp`, if it
    /// has one.
    pub mesh: Mesh,
    /// The strategies, in the order in which they annotate.
    pub strategies: Vec<SharedStrategy>,
    /// Whether a search chooses the layouts that the strategies leave open, within the session's
    /// memory limit.
    pub search: bool,
    /// The schedule of the pipeline.
    pub pipeline: Pipeline,
    /// If replicas along the axis `dp` train by themselves: how many, and when they take the mean.
    pub replicas: Option<Replicas>,
    /// Whether exchanges between ranks go before other calls that can move.
    pub exchanges_first: bool,
    /// If steps choose how they read experts: by which rule.
    pub experts: Option<ExpertChoice>,
}

/// How steps choose the way in which they read experts.
#[derive(Clone)]
pub struct ExpertChoice {
    /// The rule.
    pub policy: Arc<dyn ExpertPolicy>,
    /// The strategies of steps in which every rank reads all experts.
    pub gathering: Vec<SharedStrategy>,
}

impl Parallel {
    /// The mesh and strategies that a configuration asks for.
    pub fn new(config: &phalanx_config::Config) -> Result<Self> {
        let (steps, kind) = (config.train.steps.get() as u64, config.model.kind);
        let tutel = tutel(config);
        let config = &config.parallel;
        let mesh = mesh(config, config.stage_groups(), config.dp.get())?;
        let mut strategies: Vec<SharedStrategy> = vec![];
        // Where several ranks hold the same weights, a strategy says how they share them.
        let replicas = replicas(config, steps);
        let splits = !config.takes_turns() && config.holders.0.iter().any(|count| *count > 1);
        let shared = config.cp.get() > 1 || splits || config.dp.get() > 1 && replicas.is_none();
        let hybrid = (config.dp_shard < config.dp).then_some(config.dp_shard.get());
        let search = config.layout == LayoutKind::Auto;
        match config.zero {
            _ if !shared || search => {}
            _ if config.fsdp => strategies.push(Arc::new(Fsdp {
                shard: hybrid,
                reshard_after_forward: config.fsdp_reshard,
                prefetch: config.fsdp_prefetch,
                in_flight: config.fsdp_in_flight.get(),
                layers_per_unit: config.fsdp_layers.get(),
                ..Fsdp::default()
            })),
            ZeroStage::Zero if config.sync == SyncKind::DataParallel => {
                strategies.push(Arc::new(DataParallel::default()));
            }
            ZeroStage::Zero => strategies.push(Arc::new(Ddp {
                bucket_mib: config.bucket_mib.get() as f64,
                ..Ddp::default()
            })),
            stage => strategies.push(Arc::new(Zero {
                shard: hybrid,
                reduce_bucket_size: config.reduce_bucket_size.get(),
                allgather_bucket_size: config.allgather_bucket_size.get(),
                ..Zero::stage(stage as u8)
            })),
        }
        let chooses = config.expert_policy == PolicyKind::Tutel;
        let experts = ExpertParallel {
            exchange: match config.expert_exchange {
                ExchangeKind::Auto if chooses => ExpertExchange::AllToAll,
                given => exchange(given),
            },
            ..ExpertParallel::over(config.ep.get())
        };
        let at = strategies.len();
        if config.ep.get() > 1 {
            strategies.push(Arc::new(experts.clone()));
        }
        if config.tp.get() > 1 && !search {
            let plan = |plan: TensorPlan, (name, cut): &(String, Cut)| plan.cut(name, *cut);
            strategies.push(match (config.tp_kind, &config.tp_plan.0[..]) {
                (TpKind::OneD, []) if kind == ModelKind::Cnn => {
                    Arc::new(if config.sp { heights_plan() } else { channels_plan() })
                }
                (TpKind::OneD, []) => Arc::new(Megatron::default()),
                (TpKind::OneD, rules) => Arc::new(rules.iter().fold(TensorPlan::new("tp"), plan)),
                (TpKind::TwoD | TpKind::TwoAndAHalfD, _) => {
                    let (depth, stream) = (config.tp_depth.get(), config.stream);
                    Arc::new(Optimus { depth, stream, ..Optimus::default() })
                }
                (TpKind::Gspmd, _) => {
                    let (rows, stream) = (config.tp_rows.get(), config.stream);
                    Arc::new(Gspmd { rows, stream, ..Gspmd::default() })
                }
                (TpKind::ThreeD, _) => Arc::new(Cube { stream: config.stream, ..Cube::default() }),
            });
        }
        if config.sp {
            strategies.push(Arc::new(Sequence { stream: config.stream, ..Sequence::default() }));
        }
        if config.cp.get() > 1 && !search {
            let order = match config.cp_order {
                CpOrder::Block => Order::Block,
                CpOrder::Zigzag => Order::Zigzag,
                CpOrder::Striped => Order::Striped,
            };
            strategies.push(match config.cp_kind {
                CpKind::AllGather => Arc::new(AllGatherKv { order, ..AllGatherKv::default() }),
                CpKind::Ulysses => {
                    let heads = config.tensor_shape().map_or(config.tp.get(), |s| s.heads);
                    let alike = config.tp.get() / heads.max(1);
                    Arc::new(Ulysses { alike, ..Ulysses::default() })
                }
                CpKind::Ring => Arc::new(Ring { order, ..Ring::default() }),
                CpKind::Rsa => Arc::new(RingSelfAttention::default()),
            });
        }
        let experts = chooses.then(|| {
            let mut gathering = strategies.clone();
            gathering[at] =
                Arc::new(ExpertParallel { exchange: ExpertExchange::Weights, ..experts });
            ExpertChoice { policy: Arc::new(tutel), gathering }
        });
        let exchanges_first = config.comm_priority == CommPriority::Lina;
        let mut pipeline = Pipeline::new(config)?;
        if splits {
            let stage = |count: &usize| self::mesh(config, 1, config.dp.get() * count);
            pipeline.meshes = config.holders.0.iter().map(stage).collect::<Result<_>>()?;
        }
        Ok(Self { mesh, strategies, search, pipeline, replicas, exchanges_first, experts })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        match &self.pipeline.meshes[..] {
            [] => self.mesh.ranks(),
            meshes => meshes.iter().map(Mesh::ranks).sum(),
        }
    }

    /// How many replicas train by themselves.
    pub fn replica_count(&self) -> usize {
        self.replicas.map_or(1, |replicas| replicas.count)
    }

    /// For each stage group: the mesh that it has in each replica, and by replica its ranks in the
    /// mesh's order.
    pub fn stage_groups(&self) -> Result<Vec<(Mesh, Vec<Vec<usize>>)>> {
        if !self.pipeline.meshes.is_empty() {
            let mut next = 0;
            let stage_group = |mesh: &Mesh| {
                let ranks = next..next + mesh.ranks();
                next = ranks.end;
                (mesh.clone(), vec![ranks.collect()])
            };
            return Ok(self.pipeline.meshes.iter().map(stage_group).collect());
        }
        let stages = Axis::STAGES;
        let apart = self.replicas.map(|_| Axis::new(Replicas::AXIS)).transpose()?;
        let own: Vec<(Axis, usize)> = (self.mesh.axes())
            .filter(|(axis, _)| *axis != stages && Some(*axis) != apart)
            .collect();
        let mesh = Mesh::new(own.iter().map(|(axis, size)| (axis.name(), *size)))?;
        let along = |rank: usize, axis: Axis| match self.mesh.size(axis) {
            Some(_) => self.mesh.coordinate(rank, axis),
            None => 0,
        };
        let ranks = |stage_group: usize, replica: usize| {
            let here = |&rank: &usize| {
                along(rank, stages) == stage_group
                    && apart.is_none_or(|axis| along(rank, axis) == replica)
            };
            (0..self.mesh.ranks()).filter(here).collect()
        };
        let of_replicas = |stage_group| {
            (0..self.replica_count()).map(|replica| ranks(stage_group, replica)).collect()
        };
        let count = self.mesh.size(stages).unwrap_or(1);
        Ok((0..count).map(|stage_group| (mesh.clone(), of_replicas(stage_group))).collect())
    }

    /// The layouts that a search finds for a model on a mesh; `None` without a search.
    pub fn found(
        &self,
        model: &Model,
        mesh: &Mesh,
        memory_limit: Option<usize>,
    ) -> Result<Option<Automatic>> {
        let costs = Costs { memory_limit, ..Costs::default() };
        Ok(self.search.then(|| Automatic::search(model, mesh, &costs)).transpose()?)
    }

    /// Partitions a model over a mesh for steps in which every rank reads all experts.
    pub(crate) fn partition_gathered(&self, model: &Model, mesh: &Mesh) -> Result<Partition> {
        let given = self.experts.iter().flat_map(|experts| &experts.gathering);
        let strategies: Vec<&dyn Strategy> = given.map(|s| &**s as &dyn Strategy).collect();
        Ok(Partition::new(model, mesh, &strategies, Costs::default())?)
    }

    /// Partitions a model over a mesh, by the strategies and the result of a search.
    pub fn partition(
        &self,
        model: &Model,
        mesh: &Mesh,
        found: Option<&Automatic>,
    ) -> Result<Partition> {
        let found = found.map(|found| found as &dyn Strategy);
        let given = self.strategies.iter().map(|s| &**s as &dyn Strategy);
        let strategies: Vec<&dyn Strategy> = given.chain(found).collect();
        Ok(Partition::new(model, mesh, &strategies, Costs::default())?)
    }
}

impl fmt::Debug for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.strategies.iter().map(|s| s.name()).collect();
        write!(f, "({}) {}", self.mesh, names.join(", "))
    }
}

/// The replicas of a configuration that train by themselves, if they do.
fn replicas(config: &phalanx_config::ParallelConfig, last: u64) -> Option<Replicas> {
    let (warmup, states) = match config.sync {
        SyncKind::Ddp | SyncKind::DataParallel => return None,
        SyncKind::Average => (0, false),
        SyncKind::LocalSgd => {
            (config.sync_warmup as u64, config.sync_momentum == SyncMomentum::Average)
        }
    };
    let (count, every) = (config.dp.get(), config.sync_every as u64);
    Some(Replicas { count, every, warmup, last, states })
}

/// The mesh of a configuration with these stage groups and data-parallel ranks: its axes of more than one rank, slowest
/// first.
fn mesh(config: &phalanx_config::ParallelConfig, stages: usize, dp: usize) -> Result<Mesh> {
    let axes = config.order.axes().iter().rev();
    let degree = |axis: ParallelAxis| match axis {
        ParallelAxis::Pp => stages,
        ParallelAxis::Dp => dp,
        other => config.degree(other).get(),
    };
    let axes = axes.map(|axis| (axis.name(), degree(*axis)));
    Ok(Mesh::new(axes.filter(|&(_, size)| size > 1))?)
}

/// The rule of Tutel, for the ranks and experts of a configuration.
fn tutel(config: &phalanx_config::Config) -> Tutel {
    let (parallel, model) = (&config.parallel, &config.model);
    let ranks = parallel.ep.get();
    Tutel {
        ranks,
        dealt: parallel.expert_placement == PlacementKind::RoundRobin,
        copies: parallel.dp.get() / ranks * parallel.cp.get(),
        slices: parallel.tp.get(),
        microbatches: config.microbatches(),
        ffn: model.expert_ffn.get(),
    }
}

/// How tokens meet the experts of other ranks.
fn exchange(kind: ExchangeKind) -> ExpertExchange {
    match kind {
        ExchangeKind::Auto => ExpertExchange::Cheapest,
        ExchangeKind::AllToAll => ExpertExchange::AllToAll,
        ExchangeKind::AllGather => ExpertExchange::AllGather,
        ExchangeKind::Hierarchical => ExpertExchange::Hierarchical,
        ExchangeKind::Coordinated => ExpertExchange::Coordinated,
        ExchangeKind::Weights => ExpertExchange::Weights,
    }
}
