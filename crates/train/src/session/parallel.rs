//! How a session's ranks are arranged, and the strategies that divide the work among them.

use std::fmt;
use std::sync::Arc;

use phalanx_ir::{Mesh, Model};
use phalanx_spmd::strategies::{AllGatherKv, Ddp, Megatron, Sequence, Ulysses, Zero};
use phalanx_spmd::{Costs, Partition, Strategy};

use crate::config::{self, Axis, CpKind, ZeroStage};
use crate::error::Result;

/// A strategy that several threads may read.
pub type SharedStrategy = Arc<dyn Strategy + Send + Sync>;

/// A mesh of ranks and the strategies on it.
#[derive(Clone, Default)]
pub struct Parallel {
    /// The mesh; one rank by default.
    pub mesh: Mesh,
    /// The strategies, in the order in which they annotate.
    pub strategies: Vec<SharedStrategy>,
}

impl Parallel {
    /// The mesh and strategies that a configuration asks for.
    pub fn new(config: &config::Parallel) -> Result<Self> {
        let mesh = mesh(config)?;
        let mut strategies: Vec<SharedStrategy> = vec![];
        // Ranks that hold the same weights say how they share them.
        let shared = config.dp.get() * config.cp.get() > 1;
        match config.zero {
            _ if !shared => {}
            ZeroStage::Zero => strategies.push(Arc::new(Ddp {
                bucket_mib: config.bucket_mib.get() as f64,
                ..Ddp::default()
            })),
            stage => strategies.push(Arc::new(Zero {
                shard: (config.dp_shard < config.dp).then_some(config.dp_shard.get()),
                reduce_bucket_size: config.reduce_bucket_size.get(),
                allgather_bucket_size: config.allgather_bucket_size.get(),
                ..Zero::stage(stage as u8)
            })),
        }
        if config.tp.get() > 1 {
            strategies.push(Arc::new(Megatron::default()));
        }
        if config.sp {
            strategies.push(Arc::new(Sequence::default()));
        }
        if config.cp.get() > 1 {
            strategies.push(match config.cp_kind {
                CpKind::AllGather => Arc::new(AllGatherKv::default()),
                _ => Arc::new(Ulysses::default()),
            });
        }
        Ok(Self { mesh, strategies })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.mesh.ranks()
    }

    /// Lays a model on the mesh.
    pub fn partition(&self, model: &Model) -> Result<Partition> {
        let strategies: Vec<&dyn Strategy> =
            self.strategies.iter().map(|s| &**s as &dyn Strategy).collect();
        Ok(Partition::new(model, &self.mesh, &strategies, Costs::default())?)
    }
}

impl fmt::Debug for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.strategies.iter().map(|s| s.name()).collect();
        write!(f, "({}) {}", self.mesh, names.join(", "))
    }
}

/// The mesh of a configuration: its axes of more than one rank, slowest first.
fn mesh(config: &config::Parallel) -> Result<Mesh> {
    let degree = |axis: &Axis| match axis {
        Axis::Tp => config.tp,
        Axis::Cp => config.cp,
        Axis::Dp => config.dp,
        Axis::Pp => config.pp,
    };
    let axes = config.order.axes().iter().rev().map(|axis| (axis.name(), degree(axis).get()));
    Ok(Mesh::new(axes.filter(|&(_, size)| size > 1))?)
}
