//! ZeRO (Rajbhandari et al., 2020): data-parallel ranks keep shards of what they would all keep.
//!
//! Stage 1 keeps optimizer state in shards: gradients are reduce-scattered at the end of a step,
//! each rank updates its shard, and the new weights are gathered. Stage 2 keeps gradients in shards
//! too, so the gradient of each micro-batch is reduce-scattered at once. Stage 3 keeps weights in
//! shards: a segment's are gathered before its forward, released, and gathered again before its
//! backward.
//!
//! Memory per rank, with w, g, k bytes of weight, gradient and optimizer state per parameter:
//!
//! | stage | bytes | sent per rank and step, for m micro-batches |
//! |---|---|---|
//! | 1 | (w+g)Ψ + kΨ/N | 2Ψ(N−1)/N |
//! | 2 | wΨ + (g+k)Ψ/N | (m+1)Ψ(N−1)/N |
//! | 3 | (w+g+k)Ψ/N | 3mΨ(N−1)/N |
//!
//! plus the buffers of the units in flight.

use phalanx_ir::{Mesh, Model, Program};

use super::{BatchParallel, Strategy, present};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::sharing::{Gathering, Keep, Kept, Reduction, Sharing, UnitFacts};
use crate::split::AxisSplit;

/// What is kept in shards, one per rank; each variant includes the ones before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Sharded {
    /// Every rank keeps everything.
    #[default]
    Nothing,
    /// Optimizer state: gradients are reduced into shards, and the new weights are gathered.
    State,
    /// Gradients as well: those of each micro-batch are reduced at once.
    Gradients,
    /// Weights as well: they are gathered for the runs that read them.
    Weights,
    /// A stage that does not exist; it is refused before anything is planned.
    Unknown(u8),
}

/// State, gradients and weights in shards, by stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Zero {
    /// What is kept in shards.
    pub sharded: Sharded,
    /// The axis of the batch.
    pub axis: String,
    /// Another axis that shards, because its ranks hold the same weights: the one of context
    /// parallelism.
    pub context: String,
    /// How many data-parallel ranks share one copy; `None` means all. With fewer, copies are
    /// replicated over the rest (hybrid sharding).
    pub shard: Option<usize>,
    /// The most elements that one reduction of a unit takes.
    pub reduce_bucket_size: usize,
    /// The most elements that one gather of a unit produces.
    pub allgather_bucket_size: usize,
}

impl Zero {
    /// Stage 1, 2 or 3; with 0 every rank keeps everything. Any other number is refused when a model
    /// is partitioned.
    pub fn stage(stage: u8) -> Self {
        Self {
            sharded: match stage {
                0 => Sharded::Nothing,
                1 => Sharded::State,
                2 => Sharded::Gradients,
                3 => Sharded::Weights,
                other => Sharded::Unknown(other),
            },
            axis: "dp".to_owned(),
            context: "cp".to_owned(),
            shard: None,
            reduce_bucket_size: 500_000_000,
            allgather_bucket_size: 500_000_000,
        }
    }

    /// The stages: what a rank keeps of a unit, and when it is exchanged.
    pub(super) fn facts(&self, axes: Vec<phalanx_ir::Axis>) -> UnitFacts {
        let shards = UnitFacts {
            axes,
            reduce_elements: self.reduce_bucket_size,
            gather_elements: self.allgather_bucket_size,
            ..UnitFacts::replicated()
        };
        match self.sharded {
            Sharded::Nothing | Sharded::Unknown(_) => UnitFacts::replicated(),
            Sharded::State => UnitFacts {
                state: Kept::SHARD,
                reduction: Reduction::OwnPart,
                gathering: Gathering::AfterUpdate,
                ..shards
            },
            Sharded::Gradients => UnitFacts {
                state: Kept::SHARD,
                gradient: Kept::SHARD,
                reduction: Reduction::IntoShard,
                gathering: Gathering::AfterUpdate,
                ..shards
            },
            Sharded::Weights => UnitFacts {
                state: Kept::SHARD,
                gradient: Kept::SHARD,
                weights: Kept::SHARD,
                reduction: Reduction::IntoShard,
                gathering: Gathering::ForRuns { prefetch: 1, in_flight: 2, keep: Keep::Run },
                ..shards
            },
        }
    }

    /// The axes that shard: the part of the batch's axis that shares a copy, and the axis of
    /// context parallelism.
    pub(super) fn sharding_axes(&self, mesh: &Mesh) -> Vec<phalanx_ir::Axis> {
        let mut axes = present(mesh, &[&self.axis]);
        if let Some(shard) = self.shard {
            while mesh.count(&axes) > shard && !axes.is_empty() {
                axes.remove(0);
            }
        }
        axes.extend(present(mesh, &[&self.context]));
        axes
    }
}

impl Strategy for Zero {
    fn name(&self) -> &'static str {
        match self.sharded {
            Sharded::Nothing => "data parallelism",
            Sharded::State => "ZeRO-1",
            Sharded::Gradients => "ZeRO-2",
            Sharded::Weights => "ZeRO-3",
            Sharded::Unknown(_) => "ZeRO",
        }
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn check(&self, _model: &Model) -> Result<(), SpmdError> {
        match self.sharded {
            Sharded::Unknown(stage) => Err(SpmdError::ZeroStage { stage }),
            _ => Ok(()),
        }
    }

    fn splits(&self, _program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        hybrid_split(&self.axis, self.shard, mesh)
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        BatchParallel { axis: self.axis.clone() }.annotate(ctx)
    }

    fn share(&self, mesh: &Mesh, sharing: &mut Sharing) -> Result<(), SpmdError> {
        sharing.set(self.name(), Sharing::over(self.facts(self.sharding_axes(mesh))))
    }
}

/// The split of the batch's axis into copies, and into the ranks that share one copy.
pub(super) fn hybrid_split(
    axis: &str,
    shard: Option<usize>,
    mesh: &Mesh,
) -> Result<Vec<AxisSplit>, SpmdError> {
    let Some(shard) = shard.filter(|_| !mesh.find(axis).is_empty()) else { return Ok(vec![]) };
    let size = mesh.degree(axis);
    if shard == 0 || !size.is_multiple_of(shard) {
        return Err(SpmdError::Shards { axis: axis.to_owned(), size, shard });
    }
    Ok(vec![AxisSplit { axis: axis.to_owned(), major: size / shard }])
}
