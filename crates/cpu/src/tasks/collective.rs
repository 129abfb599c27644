//! Collectives: what ranks do together, as calls of the engine's communicator.
//!
//! Data go directly from one rank's arena to another's, in strided blocks. A collective without
//! other ranks is an ordinary copy.

use phalanx_call::Slot;
use phalanx_comm::{Blocks, ReduceOp, Strides};
use phalanx_engine::EngineError;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, DType, Exchange, Op, Order, ValueId};

use super::movement::{self, Kind};
use super::transfer::{Done, Start, Transfer};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, task};

pub(super) fn compile(op: &Operation<'_>, collective: &Collective) -> Result<Tasks, EngineError> {
    if collective.kind == CollectiveKind::Done {
        return done(op);
    }
    let (x, out) = (op.input(0), op.output(0));
    let mesh = op.program.mesh();
    let (n, shard) = (mesh.count(&collective.axes), mesh.shard(op.rank, &collective.axes));
    let local: Option<Box<dyn Task>> = match collective.kind {
        CollectiveKind::ToPartial if shard > 0 => {
            Some(movement::moved(Kind::Fill(0.0), vec![], &out))
        }
        CollectiveKind::ToPartial => Some(movement::copy(x.clone(), out.clone())),
        CollectiveKind::Shard { dim } => {
            in_blocks(op, op.instr.outputs[0], dim)?;
            let start = shard * out.shape[dim];
            Some(movement::moved(Kind::Slice { dim, start }, vec![x.clone()], &out))
        }
        _ if n == 1 => Some(movement::copy(x.clone(), out.clone())),
        _ => None,
    };
    if let Some(local) = local {
        return Ok(vec![local]);
    }
    let transfer = transfer(op, collective, n, x, out)?;
    let made = match collective.start {
        false => task(transfer),
        true => task(Start { transfer, handle: op.instr.outputs[0].index() }),
    };
    Ok(vec![made])
}

/// The call that a collective makes, which other ranks take part in.
fn transfer(
    op: &Operation<'_>,
    collective: &Collective,
    n: usize,
    x: Var,
    out: Var,
) -> Result<Transfer, EngineError> {
    use phalanx_comm::CollectiveOp as Kind;
    let around = |dim: usize, shape: &[usize]| -> [usize; 2] {
        [shape[..dim].iter().product(), shape[dim + 1..].iter().product()]
    };
    let mut axes = collective.axes.clone();
    let (kind, blocks) = match collective.kind {
        CollectiveKind::AllGather { dim } => {
            let [outer, inner] = around(dim, &x.shape);
            let order = op.program.ty(op.instr.inputs[0]).layout.dims()[dim].order;
            (Kind::AllGather, gathered(op, order, n, [outer, x.shape[dim], inner])?)
        }
        CollectiveKind::ReduceScatter { dim } => {
            in_blocks(op, op.instr.outputs[0], dim)?;
            let [outer, inner] = around(dim, &out.shape);
            let blocks = Blocks::scatter(n, outer, out.shape[dim], inner);
            (Kind::ReduceScatter(ReduceOp::Sum), blocks)
        }
        CollectiveKind::AllReduce => {
            (Kind::AllReduce(ReduceOp::Sum), Blocks::contiguous(x.elements()))
        }
        CollectiveKind::AllToAll { from, to } => {
            in_blocks(op, op.instr.inputs[0], from)?;
            in_blocks(op, op.instr.outputs[0], to)?;
            let blocks = Blocks::all_to_all(n, &x.shape, from, to);
            (Kind::AllToAll, blocks.ok_or_else(|| op.unsupported("its dims do not fit"))?)
        }
        CollectiveKind::Permute { dim } => {
            let route = Route::new(op, dim, collective);
            axes = route.axes;
            let (to, from) = (Some(route.to), Some(route.from));
            (Kind::Permute { to, from }, Blocks::contiguous(x.elements()))
        }
        _ => return Err(op.unsupported("it needs no other rank")),
    };
    let transfer = Transfer::new(op, &axes, kind, blocks, x, out)?;
    Ok(transfer.cut(collective))
}

/// Blocks of a gather along the middle of three dims, for the order of its elements.
fn gathered(
    op: &Operation<'_>,
    order: Order,
    n: usize,
    [outer, mid, inner]: [usize; 3],
) -> Result<Blocks, EngineError> {
    match order {
        Order::Block => Ok(Blocks::gather(n, outer, mid, inner)),
        // Each element of a shard is a row, n rows apart in the whole.
        Order::Striped => Ok(Blocks {
            outer,
            rows: mid,
            len: inner,
            source: Strides { block: outer * mid * inner, outer: mid * inner, row: inner },
            target: Strides { block: inner, outer: n * mid * inner, row: n * inner },
        }),
        Order::Zigzag => Err(op.unsupported("a dim in zigzag order is not gathered in one call")),
    }
}

fn in_blocks(op: &Operation<'_>, value: ValueId, dim: usize) -> Result<(), EngineError> {
    match op.program.ty(value).layout.dims()[dim].order {
        Order::Block => Ok(()),
        order => Err(op.unsupported(format!(
            "dim {dim} is {}; only dims in block order can be moved",
            order.name()
        ))),
    }
}

/// Which rank sends to which in a permute. Blocks are numbered by the old axes on the sending side
/// and by the new ones on the receiving side; where a block has several holders, or several ranks
/// need it, they are matched in the order of the remaining axes.
struct Route {
    /// Old axes, then those that only the new list has: the order of the group.
    axes: Vec<Axis>,
    to: usize,
    from: usize,
}

impl Route {
    fn new(op: &Operation<'_>, dim: usize, collective: &Collective) -> Self {
        let (mesh, operand) = (op.program.mesh(), op.program.ty(op.instr.inputs[0]));
        let [giving, getting] = collective.permute_sides(operand.layout.axes(dim));
        let group = mesh.group(op.rank, &giving);
        let own = mesh.shard(op.rank, &giving);
        let to = group.iter().position(|&rank| mesh.shard(rank, &getting) == own);
        let from = mesh.shard(op.rank, &getting);
        Self { axes: giving, to: to.unwrap_or(own), from }
    }
}

fn done(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let handle = op.instr.inputs[0];
    let start = op.program.instrs().iter().find(|i| i.outputs.contains(&handle));
    let Some(start) = start else {
        return Err(
            op.unsupported("the collective that it waits for is started in another program")
        );
    };
    let (source, target) = (op.var(start.inputs[0]), op.output(0));
    let local = match &start.op {
        Op::Collective(c) => {
            let free = matches!(c.kind, CollectiveKind::Shard { .. } | CollectiveKind::ToPartial);
            free || op.program.mesh().count(&c.axes) == 1
        }
        _ => true,
    };
    match local {
        // It was already completed at its start.
        true => Ok(vec![]),
        false => Ok(vec![task(Done { source, target, handle: handle.index() })]),
    }
}

/// The gather of the numbers that an op exchanges inside; each rank's numbers are already in place.
pub(super) struct Gather(Transfer);

impl Gather {
    pub(super) fn new(
        op: &Operation<'_>,
        exchange: &Exchange,
        offset: usize,
    ) -> Result<Self, EngineError> {
        let (mesh, elements) = (op.program.mesh(), exchange.elements());
        let var = |index: usize, count: usize| {
            let at = offset + index * elements * exchange.dtype.size();
            numbers(Slot::Workspace(at), exchange.dtype, count)
        };
        let own = var(mesh.shard(op.rank, &exchange.axes), elements);
        let all = var(0, elements * mesh.count(&exchange.axes));
        let blocks = Blocks::contiguous(elements);
        let kind = phalanx_comm::CollectiveOp::AllGather;
        Transfer::new(op, &exchange.axes, kind, blocks, own, all).map(Self)
    }
}

fn numbers(slot: Slot, dtype: DType, count: usize) -> Var {
    Var { slot, dtype, shape: vec![count], valid: vec![count] }
}

impl Task for Gather {
    fn accesses(&self, share: Share) -> Vec<Access> {
        self.0.accesses(share)
    }

    fn run(&self, cx: &Context<'_>) {
        self.0.run(cx);
    }
}
