//! Fully sharded data parallelism (Zhao et al., 2023): ZeRO's third stage as PyTorch runs it.
//!
//! Weights, gradients and optimizer state are sharded, one unit per segment or per a few layers. A
//! unit is gathered before its forward and again before its backward, one run ahead; the units of
//! at most `in_flight` runs are gathered at a time. Units of segments that are not repeated (the
//! root unit) are kept for the backward; with `reshard_after_forward` off every unit is kept, which
//! saves the second gather and costs the memory of the whole model. With `shard` below the axis's
//! ranks, copies are sharded within groups and replicated between them (hybrid): gradients are
//! scattered within and summed between.
//!
//! Memory per rank: (w + g + k)Ψ/F + the units in flight. Sent: 3Ψ(F−1)/F within a group, and
//! 2(Ψ/F)(R−1)/R between R groups.

use phalanx_ir::{Mesh, Program};

use super::zero::hybrid_split;
use super::{Strategy, Zero};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::sharing::{Gathering, Grouping, Keep, Sharing, UnitFacts};
use crate::split::AxisSplit;

/// Shards weights, and gathers them per segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Fsdp {
    /// The axis of the batch.
    pub axis: String,
    /// How many of its ranks share one copy; `None` means all.
    pub shard: Option<usize>,
    /// Whether a unit is released after its forward and gathered again for its backward.
    pub reshard_after_forward: bool,
    /// How many runs ahead a unit is gathered, forward and backward.
    pub prefetch: usize,
    /// The units of at most this many runs are gathered at a time.
    pub in_flight: usize,
    /// How many repeated segments, such as layers, make a unit: fewer, larger calls for more memory.
    pub layers_per_unit: usize,
}

impl Default for Fsdp {
    fn default() -> Self {
        Self {
            axis: "dp".to_owned(),
            shard: None,
            reshard_after_forward: true,
            prefetch: 1,
            in_flight: 2,
            layers_per_unit: 1,
        }
    }
}

impl Fsdp {
    fn zero(&self) -> Zero {
        Zero { axis: self.axis.clone(), shard: self.shard, ..Zero::stage(3) }
    }
}

impl Strategy for Fsdp {
    fn name(&self) -> &'static str {
        "FSDP"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, _program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        hybrid_split(&self.axis, self.shard, mesh)
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        self.zero().annotate(ctx)
    }

    fn share(&self, mesh: &Mesh, sharing: &mut Sharing) -> Result<(), SpmdError> {
        let zero = self.zero();
        let gathering = Gathering::ForRuns {
            prefetch: self.prefetch,
            in_flight: self.in_flight.max(1),
            keep: if self.reshard_after_forward { Keep::Root } else { Keep::Backward },
        };
        let facts = UnitFacts { gathering, ..zero.facts(zero.sharding_axes(mesh)) };
        let mut own = Sharing::over(facts);
        own.grouping = Grouping::Segments { per_unit: self.layers_per_unit.max(1) };
        sharing.set(self.name(), own)
    }
}
