//! Sequence parallelism (Korthikanti et al., 2022): between the products of tensor parallelism the
//! values lie sharded along the sequence, so norms and residual additions are not done twice and
//! what is kept of them is smaller. All-reduces become a reduce-scatter and an all-gather.
//!
//! Only the boundary is annotated; a partial sum then yields to the residual stream that it joins.

use super::{Place, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// The sequence of the residual stream on the axis of tensor parallelism.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The axis.
    pub axis: String,
}

impl Default for Sequence {
    fn default() -> Self {
        Self { axis: "tp".to_owned() }
    }
}

impl Strategy for Sequence {
    fn name(&self) -> &'static str {
        "sequence parallelism"
    }

    fn place(&self) -> Place {
        Place::Stream
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if ctx.degree(&self.axis) == 1 {
            return Ok(());
        }
        for value in ctx.boundaries() {
            if ctx.program().ty(value).shape.len() > 2 {
                ctx.shard(value, 1, &self.axis)?;
            }
        }
        Ok(())
    }
}
