//! Sequence parallelism (Korthikanti et al., 2022): between the products of tensor parallelism,
//! values are sharded along the sequence, so norms and residual additions are not computed twice
//! and less is kept for the backward. All-reduces become a reduce-scatter and an all-gather.
//!
//! Of images `[batch, height, width, channels]` it is the height: windows that reach beyond a rank's rows
//! exchange those at the edges (`ir/src/halo.rs`).
//!
//! Only boundary values, and images that are read, are annotated; a partial sum then takes the layout of the residual stream
//! that it is added to.

use phalanx_ir::{Axis, Mesh, Role};

use super::{Precedence, Strategy, present};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// Shards the residual stream along the sequence, over the axis of tensor parallelism.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The axis.
    pub axis: String,
    /// Whether products go block by block along the sequence, while the next block is on its way.
    pub stream: bool,
}

impl Default for Sequence {
    fn default() -> Self {
        Self { axis: "tp".to_owned(), stream: false }
    }
}

impl Strategy for Sequence {
    fn name(&self) -> &'static str {
        "sequence parallelism"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn place(&self) -> Precedence {
        Precedence::Stream
    }

    fn streams(&self, mesh: &Mesh) -> Vec<Axis> {
        if self.stream { present(mesh, &[&self.axis]) } else { vec![] }
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if ctx.degree(&self.axis) == 1 {
            return Ok(());
        }
        let data = ctx.program().inputs_with(Role::Data).map(|port| port.value);
        for value in ctx.boundaries().into_iter().chain(data) {
            if ctx.program().ty(value).shape.len() > 2 {
                ctx.shard(value, 1, &self.axis)?;
            }
        }
        Ok(())
    }
}
