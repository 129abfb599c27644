//! Collectives: instructions that change layouts.
//!
//! They act on a list of axes, at the minor end of a dim, and define how the type changes:
//! gathering removes a suffix of a dim's axes, reducing turns partial into replicated or sharded,
//! all-to-all moves a suffix from one dim to another. A collective may be split into `start`, which
//! returns a pending handle, and `done`, which waits for it: both buffers stay alive until then.
//! Over flat values it may be split into pieces: several calls that each take some elements of
//! every shard.

mod change;

use std::ops::Range;

use super::{Op, OpDef, Shaped, Touched};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::layout::Order;
use crate::mesh::{Axis, Mesh};
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;
use change::Change;

/// What a collective does to a layout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveKind {
    /// S → R: removes the axes from the minor end of a dim.
    AllGather {
        /// The dim.
        dim: usize,
    },
    /// P → S: sums, and appends the axes at the minor end of a dim.
    ReduceScatter {
        /// The dim.
        dim: usize,
    },
    /// P → R: sums.
    AllReduce,
    /// Moves the axes from the minor end of one dim to the minor end of another. Of regions of rows,
    /// `[…, c, d]`, a second operand may say how many rows the runs of each have, `i32[…, runs]`: what
    /// lies behind the last run is zero in operand and result, so it need not travel. Every rank knows the
    /// counts of all regions that the axes take from one rank to another, so they are whole over these axes.
    AllToAll {
        /// The dim that becomes whole.
        from: usize,
        /// The dim that becomes sharded.
        to: usize,
    },
    /// R → S: each rank keeps its block; free.
    Shard {
        /// The dim.
        dim: usize,
    },
    /// R → P: rank 0 of the axes keeps the value, the others hold zero; free.
    ToPartial,
    /// Replaces the axes of a dim by others with the same number of shards: one block from one
    /// peer.
    Permute {
        /// The dim; the collective's axes are its new ones.
        dim: usize,
    },
    /// Every rank of a dim's axes passes its block on to the rank before it and gets the next one.
    Turn {
        /// The dim.
        dim: usize,
    },
    /// S → R: one block of a dim, for every rank along the axes. The dim shrinks to that block.
    BroadcastBlock {
        /// The dim.
        dim: usize,
        /// Which block, counted along the axes.
        block: usize,
    },
    /// P → S: sums into one block of a dim that grows by the axes. The other blocks are those of a
    /// second operand, which has the result's type, or zero if there is none.
    ReduceBlock {
        /// The dim.
        dim: usize,
        /// Which block, counted along the axes.
        block: usize,
    },
    /// One of several equal blocks of what each rank holds of a dim; no rank gets anything from another.
    TakeBlock {
        /// The dim.
        dim: usize,
        /// Which block.
        block: usize,
        /// How many there are.
        of: usize,
    },
    /// Replaces one of several equal blocks of what each rank holds of a dim: the block is the first
    /// operand, the value in which it is replaced the second.
    PutBlock {
        /// The dim.
        dim: usize,
        /// Which block.
        block: usize,
        /// How many there are.
        of: usize,
    },
    /// Waits for a started collective.
    Done,
}

/// A collective over axes; with `start` it returns a pending handle.
#[derive(Clone, PartialEq, Debug)]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// The axes, major to minor.
    pub axes: Vec<Axis>,
    /// Whether it only starts, to be waited for by `done`.
    pub start: bool,
    /// How many calls it is split into, one after the other; each takes about the same number of
    /// elements.
    pub pieces: usize,
    /// The order of a dim that becomes sharded; a dim that is sharded already keeps its own.
    pub order: Order,
}

impl Collective {
    /// A collective in one piece that ends before the next instruction.
    pub fn new(kind: CollectiveKind, axes: Vec<Axis>) -> Self {
        Self { kind, axes, start: false, pieces: 1, order: Order::Block }
    }

    /// The elements of each piece, of those that one rank sends or receives (for an all-reduce: of
    /// all).
    pub fn cuts(&self, elements: usize) -> impl Iterator<Item = Range<usize>> {
        let pieces = self.pieces;
        // As even as possible, without a product that could overflow.
        let at = move |i: usize| elements / pieces * i + (elements % pieces).min(i);
        (0..pieces).map(move |i| at(i)..at(i + 1))
    }
}

const NAMES: [(&str, &str); 12] = [
    ("all_gather", "all_gather_start"),
    ("reduce_scatter", "reduce_scatter_start"),
    ("all_reduce", "all_reduce_start"),
    ("all_to_all", "all_to_all_start"),
    ("shard", "shard_start"),
    ("to_partial", "to_partial_start"),
    ("permute", "permute_start"),
    ("turn", "turn_start"),
    ("broadcast_block", "broadcast_block_start"),
    ("reduce_block", "reduce_block_start"),
    ("take_block", "take_block_start"),
    ("put_block", "put_block_start"),
];

pub(super) fn read(
    name: &str,
    axes: Vec<Axis>,
    attrs: &mut AttrReader,
) -> Option<Result<Op, String>> {
    if name == "done" {
        return Some(Ok(Collective::new(CollectiveKind::Done, axes).into()));
    }
    let index = NAMES.iter().position(|(plain, start)| name == *plain || name == *start)?;
    let kind = (|| {
        Ok(match index {
            0 => CollectiveKind::AllGather { dim: attrs.take("dim")? },
            1 => CollectiveKind::ReduceScatter { dim: attrs.take("dim")? },
            2 => CollectiveKind::AllReduce,
            3 => CollectiveKind::AllToAll { from: attrs.take("from")?, to: attrs.take("to")? },
            4 => CollectiveKind::Shard { dim: attrs.take("dim")? },
            5 => CollectiveKind::ToPartial,
            6 => CollectiveKind::Permute { dim: attrs.take("dim")? },
            7 => CollectiveKind::Turn { dim: attrs.take("dim")? },
            8 => CollectiveKind::BroadcastBlock {
                dim: attrs.take("dim")?,
                block: attrs.take("block")?,
            },
            9 => {
                CollectiveKind::ReduceBlock { dim: attrs.take("dim")?, block: attrs.take("block")? }
            }
            10 => CollectiveKind::TakeBlock {
                dim: attrs.take("dim")?,
                block: attrs.take("block")?,
                of: attrs.take("of")?,
            },
            _ => CollectiveKind::PutBlock {
                dim: attrs.take("dim")?,
                block: attrs.take("block")?,
                of: attrs.take("of")?,
            },
        })
    })();
    let start = name == NAMES[index].1;
    let read = kind.and_then(|kind| {
        let pieces = attrs.take_or("pieces", 1)?;
        let order = attrs.take_or("order", Order::Block)?;
        Ok(Collective { kind, axes, start, pieces, order }.into())
    });
    Some(read)
}

impl Collective {
    fn index(&self) -> Option<usize> {
        Some(match self.kind {
            CollectiveKind::AllGather { .. } => 0,
            CollectiveKind::ReduceScatter { .. } => 1,
            CollectiveKind::AllReduce => 2,
            CollectiveKind::AllToAll { .. } => 3,
            CollectiveKind::Shard { .. } => 4,
            CollectiveKind::ToPartial => 5,
            CollectiveKind::Permute { .. } => 6,
            CollectiveKind::Turn { .. } => 7,
            CollectiveKind::BroadcastBlock { .. } => 8,
            CollectiveKind::ReduceBlock { .. } => 9,
            CollectiveKind::TakeBlock { .. } => 10,
            CollectiveKind::PutBlock { .. } => 11,
            CollectiveKind::Done => return None,
        })
    }

    /// The axes by which blocks are numbered on both sides of a permute of a dim that is sharded by
    /// `old`: on the sending side the old axes first, on the receiving side the new ones, followed
    /// by those that only the other side has. A rank with number `n` on the receiving side gets its
    /// block from the rank with number `n` on the sending side.
    pub fn permute_sides(&self, old: &[Axis]) -> [Vec<Axis>; 2] {
        let only = |list: &[Axis], other: &[Axis]| -> Vec<Axis> {
            list.iter().copied().filter(|axis| !other.contains(axis)).collect()
        };
        let new = &self.axes[..];
        [[old, &only(new, old)].concat(), [new, &only(old, new)].concat()]
    }

    /// The type of the result, or why the collective cannot act on these operands.
    pub fn result_of(&self, operands: &[&TensorType], mesh: &Mesh) -> Result<TensorType, IrError> {
        match *operands {
            [ty] if !matches!(self.kind, CollectiveKind::PutBlock { .. }) => self.result(ty, mesh),
            [ty, rest] if self.completes() => {
                let change = Change { collective: self, ty };
                let mut result = change.completed(rest, mesh)?;
                result.pending = self.start;
                Ok(result)
            }
            [ty, counts] if let CollectiveKind::AllToAll { from, to } = self.kind => {
                let change = Change { collective: self, ty };
                change.can_begin(mesh)?;
                change.counted(counts, [from, to])?;
                self.result(ty, mesh)
            }
            _ => Err(IrError::operands(
                self.name(),
                format!("{} operands, which it does not take", operands.len()),
            )),
        }
    }

    /// Whether a second operand may say how many rows of each region travel.
    fn counts_rows(&self) -> bool {
        matches!(self.kind, CollectiveKind::AllToAll { .. })
    }

    /// Whether it can write a block of a second operand.
    fn completes(&self) -> bool {
        matches!(self.kind, CollectiveKind::ReduceBlock { .. } | CollectiveKind::PutBlock { .. })
    }

    /// Whether only what a rank itself holds is needed.
    pub fn is_local(&self) -> bool {
        use CollectiveKind::{PutBlock, Shard, TakeBlock, ToPartial};
        matches!(self.kind, Shard { .. } | ToPartial | TakeBlock { .. } | PutBlock { .. })
    }

    /// The type of the result, or why the collective cannot act on this operand alone.
    pub fn result(&self, ty: &TensorType, mesh: &Mesh) -> Result<TensorType, IrError> {
        let change = Change { collective: self, ty };
        change.can_begin(mesh)?;
        if ty.pending != (self.kind == CollectiveKind::Done) {
            return Err(change.bad(if ty.pending {
                "the operand is still pending; wait for it with done first"
            } else {
                "done waits for a started collective"
            }));
        }
        let layout = change.layout(mesh)?;
        let mut result = ty.with_layout(layout);
        if let Some((dim, block)) = change.resized(mesh)? {
            result = block.sized(&result, dim)?;
        }
        result.pending = self.start;
        result.check(mesh)?;
        change.in_pieces(&result, mesh)?;
        Ok(result)
    }

    fn dims(&self) -> Vec<usize> {
        match self.kind {
            CollectiveKind::AllGather { dim }
            | CollectiveKind::ReduceScatter { dim }
            | CollectiveKind::Shard { dim }
            | CollectiveKind::Permute { dim }
            | CollectiveKind::Turn { dim }
            | CollectiveKind::BroadcastBlock { dim, .. }
            | CollectiveKind::ReduceBlock { dim, .. }
            | CollectiveKind::TakeBlock { dim, .. }
            | CollectiveKind::PutBlock { dim, .. } => vec![dim],
            CollectiveKind::AllToAll { from, to } => vec![from, to],
            CollectiveKind::AllReduce | CollectiveKind::ToPartial | CollectiveKind::Done => vec![],
        }
    }
}

impl OpDef for Collective {
    fn name(&self) -> &'static str {
        match self.index() {
            None => "done",
            Some(index) if self.start => NAMES[index].1,
            Some(index) => NAMES[index].0,
        }
    }

    fn attrs(&self) -> Attrs {
        let attrs = match self.kind {
            CollectiveKind::AllToAll { from, to } => Attrs::new().with("from", from).with("to", to),
            CollectiveKind::BroadcastBlock { dim, block }
            | CollectiveKind::ReduceBlock { dim, block } => {
                Attrs::new().with("dim", dim).with("block", block)
            }
            CollectiveKind::TakeBlock { dim, block, of }
            | CollectiveKind::PutBlock { dim, block, of } => {
                Attrs::new().with("dim", dim).with("block", block).with("of", of)
            }
            _ => self.dims().first().map_or_else(Attrs::new, |d| Attrs::new().with("dim", d)),
        };
        let attrs = match self.pieces {
            1 => attrs,
            pieces => attrs.with("pieces", pieces),
        };
        match self.order {
            Order::Block => attrs,
            order => attrs.with("order", order.name()),
        }
    }

    fn axes(&self) -> &[Axis] {
        &self.axes
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        if !(ins.len() == 2 && (self.completes() || self.counts_rows())) {
            super::arity(ins, 1)?;
        }
        let like = if self.completes() { ins[ins.len() - 1] } else { ins[0] };
        Ok(vec![(like.dtype, like.shape.clone())])
    }

    /// Collectives change layouts, so they have no rule; [`Collective::result`] types them.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "gradients are computed before a program is partitioned"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    /// Memory that a transfer touches at its ends is part of the transfer. A block that a rank only
    /// keeps is a copy.
    fn touches(&self, _ins: &[Shaped], outs: &[Shaped]) -> Touched {
        let result = super::bytes(&outs[0]);
        match self.kind {
            CollectiveKind::Shard { .. }
            | CollectiveKind::ToPartial
            | CollectiveKind::TakeBlock { .. } => Touched { read: result, written: result },
            CollectiveKind::PutBlock { of, .. } => {
                let block = result / of as u64;
                Touched { read: block, written: block }
            }
            _ => Touched::default(),
        }
    }

    /// A block is written into the value that the others are in.
    fn in_place(&self) -> &'static [(usize, usize)] {
        match self.completes() {
            true => &[(1, 0)],
            false => &[],
        }
    }

    /// A sum over ranks may be added to what is there; a started one may not, because its memory is
    /// that of its handle.
    fn accumulates(&self, _result: usize) -> bool {
        use CollectiveKind::{AllReduce, ReduceScatter};
        !self.start && matches!(self.kind, AllReduce | ReduceScatter { .. })
    }
}
