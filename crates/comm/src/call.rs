//! A call as plain data: which ranks take part, what is done, and with which elements.

use std::fmt;

use phalanx_ir::DType;

use crate::blocks::Blocks;
use crate::group::GroupId;
use crate::site::Site;

/// How values of several ranks are combined, in the order of the group: `((x₀ ∘ x₁) ∘ x₂) ∘ …`.
/// Narrow floats are combined in `f32` and rounded once at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum; integers wrap.
    Sum,
    /// The larger value; of a NaN and a number the one that comes later in the group.
    Max,
}

/// A collective or a message. Roots and peers are places in the group, not global ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveOp<'a> {
    /// All ranks get the reduction of all; one contiguous block.
    AllReduce(ReduceOp),
    /// All ranks get the blocks of all ranks.
    AllGather,
    /// Rank `i` gets the reduction of all ranks' block `i`.
    ReduceScatter(ReduceOp),
    /// Rank `i` gets block `i` of all ranks.
    AllToAll,
    /// All-to-all of blocks that are filled in part: each row of a block consists of cells, of which only the
    /// first elements move; what lies behind them is neither read nor written. The lists are read when the
    /// call starts.
    AllToAllRagged {
        /// Elements of a cell, which divide a block's `len`.
        cell: usize,
        /// How many elements are counted as one.
        unit: usize,
        /// For every rank of the group, and every cell of its block: how many units it gets from here.
        send: &'a [usize],
        /// The same of those that come from it.
        receive: &'a [usize],
    },
    /// All ranks get the root's block.
    Broadcast {
        /// The rank whose block is sent.
        root: usize,
    },
    /// The root gets the reduction of all.
    Reduce {
        /// The rank that gets the result.
        root: usize,
        /// How values are combined.
        reduction: ReduceOp,
    },
    /// The root gets the blocks of all ranks.
    Gather {
        /// The rank that gets the blocks.
        root: usize,
    },
    /// Rank `i` gets the root's block `i`.
    Scatter {
        /// The rank whose blocks are sent.
        root: usize,
    },
    /// A message; the `n`th send on a channel meets the `n`th receive.
    Send {
        /// The receiving rank.
        to: usize,
        /// Messages on different channels do not wait for each other.
        channel: u32,
    },
    /// The other end of a message.
    Receive {
        /// The sending rank.
        from: usize,
        /// See [`CollectiveOp::Send`].
        channel: u32,
    },
    /// Every rank's block goes to at most one rank and comes from at most one.
    Permute {
        /// The rank that gets this rank's block.
        to: Option<usize>,
        /// The rank whose block this rank gets.
        from: Option<usize>,
    },
    /// No rank continues before all have arrived.
    Barrier,
}

impl CollectiveOp<'_> {
    /// Its name.
    pub fn kind(&self) -> OpKind {
        match self {
            CollectiveOp::AllReduce(_) => OpKind::AllReduce,
            CollectiveOp::AllGather => OpKind::AllGather,
            CollectiveOp::ReduceScatter(_) => OpKind::ReduceScatter,
            CollectiveOp::AllToAll => OpKind::AllToAll,
            CollectiveOp::AllToAllRagged { .. } => OpKind::AllToAllRagged,
            CollectiveOp::Broadcast { .. } => OpKind::Broadcast,
            CollectiveOp::Reduce { .. } => OpKind::Reduce,
            CollectiveOp::Gather { .. } => OpKind::Gather,
            CollectiveOp::Scatter { .. } => OpKind::Scatter,
            CollectiveOp::Send { .. } => OpKind::Send,
            CollectiveOp::Receive { .. } => OpKind::Receive,
            CollectiveOp::Permute { .. } => OpKind::Permute,
            CollectiveOp::Barrier => OpKind::Barrier,
        }
    }

    /// How values are combined, if they are.
    pub fn reduction(&self) -> Option<ReduceOp> {
        match *self {
            CollectiveOp::AllReduce(reduction)
            | CollectiveOp::ReduceScatter(reduction)
            | CollectiveOp::Reduce { reduction, .. } => Some(reduction),
            _ => None,
        }
    }

    /// The one rank that differs from the others.
    pub fn root(&self) -> Option<usize> {
        match *self {
            CollectiveOp::Broadcast { root }
            | CollectiveOp::Reduce { root, .. }
            | CollectiveOp::Gather { root }
            | CollectiveOp::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// How many blocks the place `index` of a group of `n` sends, and how many it receives.
    pub fn blocks(&self, n: usize, index: usize) -> (usize, usize) {
        let at = |root: usize, blocks: usize| if root == index { blocks } else { 0 };
        match *self {
            CollectiveOp::AllReduce(_) => (1, 1),
            CollectiveOp::AllGather => (1, n),
            CollectiveOp::ReduceScatter(_) => (n, 1),
            CollectiveOp::AllToAll | CollectiveOp::AllToAllRagged { .. } => (n, n),
            CollectiveOp::Broadcast { root } => (at(root, 1), 1),
            CollectiveOp::Reduce { root, .. } => (1, at(root, 1)),
            CollectiveOp::Gather { root } => (1, at(root, n)),
            CollectiveOp::Scatter { root } => (at(root, n), 1),
            CollectiveOp::Send { .. } => (1, 0),
            CollectiveOp::Receive { .. } => (0, 1),
            CollectiveOp::Permute { to, from } => (to.is_some().into(), from.is_some().into()),
            CollectiveOp::Barrier => (0, 0),
        }
    }
}

/// The name of an [`CollectiveOp`], as it stands in messages and counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names of the variants of Op, described there")]
pub enum OpKind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    AllToAllRagged,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    Send,
    Receive,
    Permute,
    Barrier,
}

impl OpKind {
    /// Every name.
    pub const ALL: [OpKind; 13] = [
        OpKind::AllReduce,
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::AllToAll,
        OpKind::AllToAllRagged,
        OpKind::Broadcast,
        OpKind::Reduce,
        OpKind::Gather,
        OpKind::Scatter,
        OpKind::Send,
        OpKind::Receive,
        OpKind::Permute,
        OpKind::Barrier,
    ];

    /// The name in lower case with underscores.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::AllReduce => "all_reduce",
            OpKind::AllGather => "all_gather",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::AllToAll => "all_to_all",
            OpKind::AllToAllRagged => "all_to_all_ragged",
            OpKind::Broadcast => "broadcast",
            OpKind::Reduce => "reduce",
            OpKind::Gather => "gather",
            OpKind::Scatter => "scatter",
            OpKind::Send => "send",
            OpKind::Receive => "receive",
            OpKind::Permute => "permute",
            OpKind::Barrier => "barrier",
        }
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call of one rank: everything but the memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call<'a> {
    /// The ranks that take part.
    pub group: GroupId,
    /// What is done.
    pub op: CollectiveOp<'a>,
    /// The type of elements.
    pub dtype: DType,
    /// Their places.
    pub blocks: Blocks,
    /// For reductions: the result is added to what the receiving buffer holds (for a maximum:
    /// combined with it) instead of replacing it. For `all_reduce` the receiving buffers of all
    /// members must hold the same values: each member adds only to its own part, and the parts are
    /// then exchanged.
    pub accumulate: bool,
    /// Where it was called, for messages.
    pub site: Site,
    /// What its traffic is counted under: a small number.
    pub tag: u32,
}

impl<'a> Call<'a> {
    /// A call without a site, counted under tag 0.
    pub fn new(group: GroupId, op: CollectiveOp<'a>, dtype: DType, blocks: Blocks) -> Self {
        Self { group, op, dtype, blocks, accumulate: false, site: Site::default(), tag: 0 }
    }

    /// The same call made at a site.
    pub fn at(self, site: Site) -> Self {
        Self { site, ..self }
    }

    /// The same call, counted under a tag.
    pub fn tagged(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    /// The same call, whose result is added to what is there.
    pub fn accumulating(self) -> Self {
        Self { accumulate: true, ..self }
    }

    /// How many elements the buffers given and received into must span at the place `index` of a
    /// group of `n`; `None` if that overflows.
    pub fn elements(&self, n: usize, index: usize) -> Option<(usize, usize)> {
        let (given, got) = self.op.blocks(n, index);
        Some((
            self.blocks.span(&self.blocks.source, given)?,
            self.blocks.span(&self.blocks.target, got)?,
        ))
    }
}
