//! Ring Self-Attention (Li et al., 2021): each rank has a part of every sequence; keys go around a ring
//! for the scores, then values for the result. Scores of a rank's queries are stored whole.
//!
//! It annotates sequences as all-gather KV does, and asks for a stream, like Ring Attention. Positions
//! are distributed in blocks, as in the paper: every step computes with all its keys, masked or not, so
//! another order would not balance anything.

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{Axis, Mesh};

use super::allgather_kv::shard_sequence;
use super::find::attentions;
use super::{Precedence, Strategy, present};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// The sequence on an axis; keys, then values are passed around, and scores stored.
#[derive(Clone, Debug)]
pub struct RingSelfAttention {
    /// The axis.
    pub axis: String,
}

impl Default for RingSelfAttention {
    fn default() -> Self {
        Self { axis: "cp".to_owned() }
    }
}

impl Strategy for RingSelfAttention {
    fn name(&self) -> &'static str {
        "Ring Self-Attention"
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
        if attentions(ctx.program()).iter().any(|found| !stored(found.kind)) {
            return Err(ctx.refuse(
                "it passes blocks between rows of stored scores, and this attention stores none\n  \
                 nearest that work: attention with stored scores, or Ring Attention",
            ));
        }
        shard_sequence(ctx, &self.axis)
    }

    fn streams(&self, mesh: &Mesh) -> Vec<Axis> {
        present(mesh, &[&self.axis])
    }
}
