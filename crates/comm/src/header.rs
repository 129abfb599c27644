//! What a rank announces to the other members of a group about a call.

use phalanx_ir::DType;

use crate::call::{Call, CollectiveOp, OpKind, ReduceOp};
use crate::error::Side;
use crate::group::Group;
use crate::site::Site;

/// No root, no peer.
pub(crate) const NOBODY: u32 = u32::MAX;

/// The part of a call that is compared between members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: OpKind,
    pub(crate) reduction: Option<ReduceOp>,
    pub(crate) dtype: DType,
    pub(crate) accumulate: bool,
    /// The root, or the rank that gets this rank's block.
    pub(crate) to: u32,
    /// The rank whose block this rank gets.
    pub(crate) from: u32,
    pub(crate) shape: [usize; 3],
}

impl Header {
    /// The header of a call.
    pub(crate) fn of(call: &Call<'_>) -> Self {
        let (to, from) = match call.op {
            CollectiveOp::Permute { to, from } => (to, from),
            op => (op.root(), None),
        };
        let place = |index: Option<usize>| index.map_or(NOBODY, |index| index as u32);
        Self {
            kind: call.op.kind(),
            reduction: call.op.reduction(),
            dtype: call.dtype,
            accumulate: call.accumulate,
            to: place(to),
            from: place(from),
            shape: [call.blocks.outer, call.blocks.rows, call.blocks.len],
        }
    }

    /// A barrier: the placeholder where nothing was called yet.
    pub(crate) fn nothing() -> Self {
        Self {
            kind: OpKind::Barrier,
            reduction: None,
            dtype: DType::Bool,
            accumulate: false,
            to: NOBODY,
            from: NOBODY,
            shape: [0; 3],
        }
    }

    /// Elements of a block.
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The same for error messages, as called by a member of a group.
    pub(crate) fn side(&self, group: &Group, index: usize, site: Site) -> Side {
        let global = |place: u32| group.ranks().get(place as usize).copied();
        let peers = match (self.kind, global(self.to), global(self.from)) {
            (OpKind::Permute, to, from) => {
                let name = |rank: Option<usize>| {
                    rank.map_or_else(|| "nobody".to_string(), |rank| format!("rank {rank}"))
                };
                format!(" to {} and from {}", name(to), name(from))
            }
            (_, Some(root), _) => format!(" with root {root}"),
            _ => String::new(),
        };
        Side {
            rank: group.ranks()[index],
            kind: self.kind,
            reduction: self.reduction,
            accumulate: self.accumulate,
            peers,
            dtype: self.dtype,
            shape: self.shape,
            site,
        }
    }
}
