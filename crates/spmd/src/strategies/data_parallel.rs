//! Data parallelism with one owner (`nn.DataParallel` of PyTorch): the first rank keeps the weights and
//! the optimizer's state, collects the gradients of all, updates, and sends new weights to all.
//!
//! It is an honest baseline. All that moves goes through one rank, which sends Ψ(N−1) elements and receives
//! as many, where a ring takes 2Ψ(N−1)/N from each; and all ranks wait while one updates. The original also
//! computes the loss on the first device; here every rank has the loss of its own samples.
//!
//! Memory: (w+g+k)Ψ on the first rank, (w+g)Ψ on the others.

use phalanx_ir::{Axis, Mesh};

use super::{BatchParallel, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::sharing::{Gathering, Kept, Reduction, Sharing, UnitFacts};

/// Shards the batch over an axis, whose first rank updates for all.
#[derive(Clone, Debug, PartialEq)]
pub struct DataParallel {
    /// The axis.
    pub axis: String,
}

impl Default for DataParallel {
    fn default() -> Self {
        Self { axis: "dp".to_owned() }
    }
}

impl Strategy for DataParallel {
    fn name(&self) -> &'static str {
        "DataParallel"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        BatchParallel { axis: self.axis.clone() }.annotate(ctx)
    }

    fn share(&self, mesh: &Mesh, sharing: &mut Sharing) -> Result<(), SpmdError> {
        let axes: Vec<Axis> = mesh.find(&self.axis);
        let facts = UnitFacts {
            axes,
            state: Kept::ROOT,
            gathering: Gathering::AfterUpdate,
            reduction: Reduction::OnRoot,
            ..UnitFacts::replicated()
        };
        sharing.set(self.name(), Sharing::over(facts))
    }
}
