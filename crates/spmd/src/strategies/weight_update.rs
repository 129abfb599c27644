//! Automatic cross-replica sharding of the weight update (Xu et al., 2020).
//!
//! Replicas of a weight would all compute the same update. Instead gradients are reduce-scattered,
//! each replica updates its part with its part of the optimizer's state, and the new weights are
//! gathered: the same bytes as an all-reduce, 1/N of the update's work and of the state's memory.
//!
//! Memory per rank: (w+g)Ψ + kΨ/N. Sent: 2Ψ(N−1)/N.

use phalanx_ir::Mesh;

use super::{BatchParallel, Strategy, Zero};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::sharing::Sharing;

/// Shards the update; everything else is replicated over the batch's axis.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightUpdateSharding {
    /// The axis of the batch.
    pub axis: String,
}

impl Default for WeightUpdateSharding {
    fn default() -> Self {
        Self { axis: "dp".to_owned() }
    }
}

impl Strategy for WeightUpdateSharding {
    fn name(&self) -> &'static str {
        "weight-update sharding"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        BatchParallel { axis: self.axis.clone() }.annotate(ctx)
    }

    fn share(&self, mesh: &Mesh, sharing: &mut Sharing) -> Result<(), SpmdError> {
        let mut own = Sharing::none();
        Zero { axis: self.axis.clone(), ..Zero::stage(1) }.share(mesh, &mut own)?;
        sharing.set(self.name(), own)
    }
}
