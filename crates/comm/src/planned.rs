//! From the collectives of a program to calls of a transport: the same for every engine.
//!
//! An engine asks what a collective does on its rank ([`PlannedCollective::of`]), and plans the calls of
//! those that other ranks take part in with its [`CountedEndpoint`], which also knows under which axes
//! traffic is counted.

mod endpoint;
mod rows;

use std::ops::Range;

use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Instr, LocalPart, Op, Order, Program, ValueId};

use crate::blocks::{Blocks, Strides};
use crate::call::{Call, CollectiveOp, ReduceOp};

pub use endpoint::{CallSite, CountedEndpoint};
pub use rows::{FilledRows, PlannedRows};

/// A call, with the first element that it takes of its buffers.
pub type PlacedCall = (usize, Call<'static>);

/// What a collective of a program does on one rank.
#[derive(Clone, PartialEq, Debug)]
pub enum PlannedCollective {
    /// The result is zeros.
    Zeros,
    /// The result is the operand.
    Copy,
    /// The result is a part of the operand along a dim.
    Slice {
        /// The dim.
        dim: usize,
        /// The first index.
        start: usize,
    },
    /// The result consists of some places of the operand along a dim.
    Pick {
        /// The dim.
        dim: usize,
        /// For each index of the result, the index of the operand.
        places: Vec<usize>,
    },
    /// Ranks move elements between them as if a dim were distributed in blocks; before a scatter its
    /// elements are picked for that, and after a gather for the result.
    Dealt {
        /// The dim.
        dim: usize,
        /// For each index after picking, the index before.
        places: Vec<usize>,
        /// The axes of the group, in its order.
        axes: Vec<Axis>,
        /// What the group does.
        op: CollectiveOp<'static>,
        /// Where elements lie on both sides.
        blocks: Blocks,
    },
    /// The first operand is put into the second one along a dim.
    Put {
        /// The dim.
        dim: usize,
        /// The first index.
        start: usize,
    },
    /// Another rank gets the sum of all. The result here is the second operand; without one it is
    /// zeros, once the operand was given.
    Given {
        /// The axes of the group, in its order.
        axes: Vec<Axis>,
        /// What the group does.
        op: CollectiveOp<'static>,
        /// Where elements lie on both sides.
        blocks: Blocks,
    },
    /// Ranks move rows of regions between them, as many as a second operand says.
    Rows(PlannedRows),
    /// Ranks move elements between them.
    Calls {
        /// The axes of the group, in its order.
        axes: Vec<Axis>,
        /// What the group does.
        op: CollectiveOp<'static>,
        /// Where elements lie on both sides.
        blocks: Blocks,
    },
}

impl PlannedCollective {
    /// What a collective does on the rank at this place of the program's mesh. Says why it cannot be
    /// done. The end of a collective is not asked for here.
    pub fn of(
        program: &Program,
        instr: &Instr,
        collective: &Collective,
        rank: usize,
    ) -> Result<Self, String> {
        let mesh = program.mesh();
        let (n, shard) = (mesh.count(&collective.axes), mesh.shard(rank, &collective.axes));
        let out = program.ty(instr.outputs[0]).local_shape(mesh);
        Ok(match collective.kind {
            CollectiveKind::ToPartial if shard > 0 => Self::Zeros,
            CollectiveKind::TakeBlock { dim, block, .. } => {
                Self::Slice { dim, start: block * out[dim] }
            }
            CollectiveKind::PutBlock { dim, block, of } => {
                Self::Put { dim, start: block * (out[dim] / of) }
            }
            CollectiveKind::Shard { dim } => match order(program, instr.outputs[0], dim) {
                Order::Block => Self::Slice { dim, start: shard * out[dim] },
                order => {
                    let part = LocalPart { order, shard, shards: n, extent: n * out[dim] };
                    Self::Pick { dim, places: (0..out[dim]).map(|i| part.global(i)).collect() }
                }
            },
            _ if n == 1 || collective.kind == CollectiveKind::ToPartial => Self::Copy,
            _ => Self::between_ranks(program, instr, collective, rank)?,
        })
    }

    fn between_ranks(
        program: &Program,
        instr: &Instr,
        collective: &Collective,
        rank: usize,
    ) -> Result<Self, String> {
        let (mesh, operand, result) = (program.mesh(), instr.inputs[0], instr.outputs[0]);
        let (x, out) =
            (program.ty(operand).local_shape(mesh), program.ty(result).local_shape(mesh));
        let n = mesh.count(&collective.axes);
        let around = |dim: usize, shape: &[usize]| -> [usize; 2] {
            [shape[..dim].iter().product(), shape[dim + 1..].iter().product()]
        };
        let mut axes = collective.axes.clone();
        let (op, blocks) = match collective.kind {
            CollectiveKind::AllGather { dim } => {
                let [outer, inner] = around(dim, &x);
                let order = order(program, operand, dim);
                if order == Order::Zigzag {
                    let blocks = Blocks::gather(n, outer, x[dim], inner);
                    let places = places_of_whole(order, n, x[dim]);
                    return Ok(Self::Dealt {
                        dim,
                        places,
                        axes,
                        op: CollectiveOp::AllGather,
                        blocks,
                    });
                }
                (CollectiveOp::AllGather, gathered(order, n, [outer, x[dim], inner]))
            }
            CollectiveKind::ReduceScatter { dim } => {
                let [outer, inner] = around(dim, &out);
                let blocks = Blocks::scatter(n, outer, out[dim], inner);
                let op = CollectiveOp::ReduceScatter(ReduceOp::Sum);
                let order = order(program, result, dim);
                if order != Order::Block {
                    let places = places_by_shard(order, n, out[dim]);
                    return Ok(Self::Dealt { dim, places, axes, op, blocks });
                }
                (op, blocks)
            }
            CollectiveKind::AllReduce => {
                let elements = x.iter().product();
                (CollectiveOp::AllReduce(ReduceOp::Sum), Blocks::contiguous(elements))
            }
            CollectiveKind::AllToAll { from, to } => {
                in_blocks(program, operand, from)?;
                in_blocks(program, result, to)?;
                let blocks = Blocks::all_to_all(n, &x, from, to).ok_or("its dims do not fit")?;
                if let Some(&counts) = instr.inputs.get(1) {
                    let runs = program.ty(counts).shape.last().copied().unwrap_or(1);
                    let shard = mesh.shard(rank, &axes);
                    let moved = rows::Moved { shape: &x, dims: [from, to], runs, n, shard };
                    return Ok(Self::Rows(PlannedRows::new(axes, blocks, moved)));
                }
                (CollectiveOp::AllToAll, blocks)
            }
            CollectiveKind::Permute { dim } => {
                let op;
                (axes, op) = permute(program, instr, collective, dim, rank);
                (op, Blocks::contiguous(x.iter().product()))
            }
            CollectiveKind::Turn { .. } => {
                let own = mesh.shard(rank, &axes);
                let (to, from) = ((own + n - 1) % n, (own + 1) % n);
                let op = CollectiveOp::Permute { to: Some(to), from: Some(from) };
                (op, Blocks::contiguous(x.iter().product()))
            }
            CollectiveKind::BroadcastBlock { block, .. } => {
                (CollectiveOp::Broadcast { root: block }, Blocks::contiguous(x.iter().product()))
            }
            CollectiveKind::ReduceBlock { block, .. } => {
                let op = CollectiveOp::Reduce { root: block, reduction: ReduceOp::Sum };
                let blocks = Blocks::contiguous(x.iter().product());
                if mesh.shard(rank, &axes) != block {
                    return Ok(Self::Given { axes, op, blocks });
                }
                (op, blocks)
            }
            _ => return Err("it needs no other rank".to_owned()),
        };
        Ok(Self::Calls { axes, op, blocks })
    }

    /// Bytes of scratch memory, on every rank, for elements that are picked before or after they are moved.
    pub fn picked_bytes(program: &Program, instr: &Instr, collective: &Collective) -> usize {
        let (x, out) = (instr.inputs[0], instr.outputs[0]);
        let whole = match collective.kind {
            CollectiveKind::AllGather { dim } if order(program, x, dim) == Order::Zigzag => out,
            CollectiveKind::ReduceScatter { dim } if order(program, out, dim) != Order::Block => x,
            _ => return 0,
        };
        match program.mesh().count(&collective.axes) {
            1 => 0,
            _ => program.ty(whole).local_bytes(program.mesh()),
        }
    }

    /// Whether the collective that a value is the handle of was already complete when it was started.
    /// `None` if no instruction of the program started it.
    pub fn ends_at_start(program: &Program, handle: ValueId) -> Option<bool> {
        let start = program.instrs().iter().find(|i| i.outputs.contains(&handle))?;
        Some(match &start.op {
            Op::Collective(c) => c.is_local() || program.mesh().count(&c.axes) == 1,
            _ => true,
        })
    }
}

/// The same call in pieces: each takes some columns of every block.
pub(crate) fn cut(collective: &Collective, whole: Call<'static>) -> Vec<PlacedCall> {
    if collective.pieces <= 1 {
        return vec![(0, whole)];
    }
    let piece = |columns: Range<usize>| {
        let blocks = Blocks { len: columns.len(), ..whole.blocks };
        (columns.start, Call { blocks, ..whole })
    };
    collective.cuts(whole.blocks.len).map(piece).collect()
}

/// Blocks of a gather along the middle of three dims, for the order of its elements.
fn gathered(order: Order, n: usize, [outer, mid, inner]: [usize; 3]) -> Blocks {
    match order {
        Order::Block | Order::Zigzag => Blocks::gather(n, outer, mid, inner),
        // Each element of a shard is a row, n rows apart in the whole.
        Order::Striped => Blocks {
            outer,
            rows: mid,
            len: inner,
            source: Strides { block: outer * mid * inner, outer: mid * inner, row: inner },
            target: Strides { block: inner, outer: n * mid * inner, row: n * inner },
        },
    }
}

/// Where the elements of `n` shards of `len` elements lie in the whole, shard by shard.
fn places_by_shard(order: Order, n: usize, len: usize) -> Vec<usize> {
    let place = |i: usize| order.global(i % len, i / len, n, n * len);
    (0..n * len).map(place).collect()
}

/// For each element of the whole, where it lies in a list of the shards.
fn places_of_whole(order: Order, n: usize, len: usize) -> Vec<usize> {
    let mut places = vec![0; n * len];
    for (at, place) in places_by_shard(order, n, len).into_iter().enumerate() {
        places[place] = at;
    }
    places
}

fn order(program: &Program, value: ValueId, dim: usize) -> Order {
    program.ty(value).layout.dims()[dim].order
}

fn in_blocks(program: &Program, value: ValueId, dim: usize) -> Result<(), String> {
    match order(program, value, dim) {
        Order::Block => Ok(()),
        order => {
            Err(format!("dim {dim} is {}; only dims in block order can be moved", order.name()))
        }
    }
}

/// Which rank sends to which in a permute. Blocks are numbered by the old axes on the sending side
/// and by the new ones on the receiving side; where a block has several holders, or several ranks
/// need it, they are matched in the order of the remaining axes. The axes of the group are the old
/// ones, then those that only the new list has.
fn permute(
    program: &Program,
    instr: &Instr,
    collective: &Collective,
    dim: usize,
    rank: usize,
) -> (Vec<Axis>, CollectiveOp<'static>) {
    let (mesh, operand) = (program.mesh(), program.ty(instr.inputs[0]));
    let [giving, getting] = collective.permute_sides(operand.layout.axes(dim));
    let group = mesh.group(rank, &giving);
    let own = mesh.shard(rank, &giving);
    let to = group.iter().position(|&rank| mesh.shard(rank, &getting) == own);
    let from = mesh.shard(rank, &getting);
    (giving, CollectiveOp::Permute { to: Some(to.unwrap_or(own)), from: Some(from) })
}
