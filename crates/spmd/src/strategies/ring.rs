//! Ring Attention (Liu et al., 2023): each rank has a part of every sequence, and keys and values go
//! around a ring of ranks, block by block.
//!
//! It annotates sequences as all-gather KV does, and asks for a stream instead of the gather: a rank
//! attends to its own keys, passes them on, attends to those it got, and so on. The result and its
//! log-sum-exp are carried from step to step. Under a causal mask blocks in their order would leave
//! the first ranks idle, so by default sequences are distributed in zigzag: of 2n blocks, rank i has blocks
//! i and 2n−1−i, and every rank has the same work in every step (Zhu's zigzag; Brandon et al., 2023,
//! deal element by element, striped).

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{Axis, Mesh, Order};

use super::allgather_kv::shard_sequence;
use super::find::attentions;
use super::{Precedence, Strategy, present};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// The sequence on an axis, keys and values passed around.
#[derive(Clone, Debug)]
pub struct Ring {
    /// The axis.
    pub axis: String,
    /// How positions are distributed to its ranks.
    pub order: Order,
}

impl Default for Ring {
    fn default() -> Self {
        Self { axis: "cp".to_owned(), order: Order::Zigzag }
    }
}

impl Strategy for Ring {
    fn name(&self) -> &'static str {
        "Ring Attention"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn place(&self) -> Precedence {
        Precedence::Context
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if ctx.degree(&self.axis) == 1 {
            return Ok(());
        }
        let stored = |kind| kind == AttentionKind::Materialised;
        if attentions(ctx.program()).iter().any(|found| stored(found.kind)) {
            return Err(ctx.refuse(
                "attention with stored scores needs all keys at once, and a ring never has them\n  \
                 nearest that work: attention without stored scores, or all-gather KV",
            ));
        }
        ctx.order(&self.axis, self.order)?;
        shard_sequence(ctx, &self.axis)
    }

    fn streams(&self, mesh: &Mesh) -> Vec<Axis> {
        present(mesh, &[&self.axis])
    }
}
