//! Ulysses (Jacobs et al., 2023): each rank has a part of every sequence, but in attention whole
//! sequences of a part of the heads.
//!
//! It annotates the sequence of the stream, the heads of attention's operands, and the sequence of
//! its result; the all-to-alls between these layouts follow automatically. With fewer key heads
//! than ranks, keys and values are sharded by the major part of the axis, and the ranks of the
//! minor part read the same heads.

use phalanx_ir::{Mesh, Program};

use super::allgather_kv::shard_sequence;
use super::find::attentions;
use super::megatron::{enough_heads, shared};
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// Shards the sequence over an axis, and the heads in attention.
#[derive(Clone, Debug)]
pub struct Ulysses {
    /// The axis.
    pub axis: String,
    /// The axis that shards heads already, major to this one.
    pub inside: String,
    /// Of the ranks of that axis, how many hold the same heads: a square of ranks divides heads
    /// among its columns alone.
    pub alike: usize,
}

impl Default for Ulysses {
    fn default() -> Self {
        Self { axis: "cp".to_owned(), inside: "tp".to_owned(), alike: 1 }
    }
}

impl Ulysses {
    /// Among how many ranks heads are divided already.
    fn divided(&self, mesh: &Mesh) -> usize {
        mesh.degree(&self.inside).div_ceil(self.alike.max(1))
    }
}

impl Strategy for Ulysses {
    fn name(&self) -> &'static str {
        "Ulysses"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        let cut = |kv_heads: usize| {
            // The key heads that each rank of tensor parallelism has.
            let left = kv_heads.div_ceil(self.divided(mesh));
            AxisSplit { axis: self.axis.clone(), major: shared(left, mesh.degree(&self.axis)) }
        };
        Ok(attentions(program).iter().map(|a| cut(a.kv_heads)).collect())
    }

    fn place(&self) -> Precedence {
        Precedence::Context
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        let degree = ctx.degree(&self.axis);
        if degree == 1 {
            return Ok(());
        }
        shard_sequence(ctx, &self.axis)?;
        let (program, mesh) = (ctx.program(), ctx.mesh());
        for found in attentions(program) {
            let inside = self.divided(mesh);
            let left = found.kv_heads.div_ceil(inside);
            enough_heads(ctx, &self.axis, degree, found.heads / inside, left)?;
            let [q, k, v] = found.qkv();
            ctx.shard(q, 2, &self.axis)?;
            for kv in [k, v] {
                let mut room = left;
                for atom in mesh.expand(&self.axis)? {
                    let size = mesh.count(&[atom]);
                    if room >= size {
                        ctx.shard(kv, 2, atom.name())?;
                        room = room.div_ceil(size);
                    } else {
                        ctx.replicate(kv, atom.name())?;
                    }
                }
            }
            ctx.shard(found.output(), 1, &self.axis)?;
        }
        Ok(())
    }
}
