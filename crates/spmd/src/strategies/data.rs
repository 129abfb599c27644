//! Data parallelism (the oldest of all): every rank has the weights and a part of the batch.
//!
//! The axis shards the batch dim of data and boundary values; parameters are replicated. Their
//! gradients are then partial sums over the axis, which the script reduces.

use phalanx_ir::Role;

use super::Strategy;
use super::experts::of_experts;
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// Shards the batch over an axis.
#[derive(Clone, Debug)]
pub struct BatchParallel {
    /// The axis.
    pub axis: String,
}

impl Default for BatchParallel {
    fn default() -> Self {
        Self { axis: "dp".to_owned() }
    }
}

impl Strategy for BatchParallel {
    fn name(&self) -> &'static str {
        "data parallelism"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        let degree = ctx.degree(&self.axis);
        if degree == 1 {
            return Ok(());
        }
        let program = ctx.program();
        let data = program.inputs_with(Role::Data).map(|p| p.value);
        for value in data.chain(ctx.boundaries()).collect::<Vec<_>>() {
            let Some(&batch) = program.ty(value).shape.first() else { continue };
            if batch < degree {
                return Err(ctx.refuse(format!(
                    "a batch of {batch} cannot be divided among the {degree} ranks of `{axis}`\n  \
                     each rank needs at least one sample of a micro-batch\n  \
                     nearest that work: {batch} ranks of `{axis}`, or a batch of {degree}",
                    axis = self.axis
                )));
            }
            ctx.shard(value, 0, &self.axis)?;
        }
        // Experts, and nothing else, may have been distributed to a part of the axis.
        let experts = of_experts(ctx.program());
        for part in ctx.mesh().expand(&self.axis)? {
            for param in ctx.params() {
                let is_expert = experts.contains(&param.value);
                if !(is_expert && ctx.is_decided(param.value, part.name())?) {
                    ctx.replicate(param.value, part.name())?;
                }
            }
        }
        Ok(())
    }
}
