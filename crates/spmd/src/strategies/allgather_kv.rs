//! All-gather KV context parallelism (as in LLaMA 3's training): each rank has a part of every
//! sequence, and gathers the keys and values of the whole sequence before attention.
//!
//! It annotates the sequence dims of data and boundary values; the rule of attention says that it
//! needs all keys and values, so the gathers and the reduce-scatters of their gradients follow
//! automatically. In zigzag, as LLaMA 3's training has it, every rank has as much of a causal mask as any other.

use phalanx_ir::{Order, Role};

use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// The sequence on an axis, keys and values gathered.
#[derive(Clone, Debug)]
pub struct AllGatherKv {
    /// The axis.
    pub axis: String,
    /// How positions are distributed to its ranks.
    pub order: Order,
}

impl Default for AllGatherKv {
    fn default() -> Self {
        Self { axis: "cp".to_owned(), order: Order::Block }
    }
}

impl Strategy for AllGatherKv {
    fn name(&self) -> &'static str {
        "all-gather KV"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn place(&self) -> Precedence {
        Precedence::Context
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if self.order != Order::Block && ctx.degree(&self.axis) > 1 {
            ctx.order(&self.axis, self.order)?;
        }
        shard_sequence(ctx, &self.axis)
    }
}

/// Puts the sequence of data and boundaries on an axis and reads parameters whole.
pub(super) fn shard_sequence(ctx: &mut Annotator<'_>, axis: &str) -> Result<(), SpmdError> {
    if ctx.degree(axis) == 1 {
        return Ok(());
    }
    let program = ctx.program();
    let data = program.inputs_with(Role::Data).map(|p| p.value);
    for value in data.chain(ctx.boundaries()).collect::<Vec<_>>() {
        if program.ty(value).shape.len() < 2 {
            return Err(ctx.refuse(format!(
                "{} has no sequence dim that `{axis}` could shard\n  \
                 nearest that work: data parallelism; or the height of images on ranks of `tp`",
                program.ty(value)
            )));
        }
        ctx.shard(value, 1, axis)?;
    }
    for param in ctx.params() {
        ctx.replicate(param.value, axis)?;
    }
    Ok(())
}
