//! Collectives: what ranks do together, through the engine's communicator.
//!
//! The first worker, which is the thread that launched the program, communicates for its rank; the
//! others meet it at the barriers that the accesses here ask for. Data go straight from one rank's
//! arena to another's, in strided blocks. What needs no other rank is an ordinary copy.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use phalanx_comm::{
    Blocks, Call, CommError, Communicator, Group, Handle, Reduction, Site, Strides,
};
use phalanx_engine::EngineError;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, DType, Exchange, Op, OpDef, Order, ValueId};
use phalanx_script::Slot;

use super::movement::{self, Kind};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, task};

/// The endpoint of an engine's rank, which one worker at a time uses.
pub(crate) type Endpoint = Mutex<Line>;

/// A rank's way to the others.
pub(crate) struct Line {
    pub(crate) comm: Box<dyn Communicator>,
    /// By tag: the axes whose traffic is counted under it.
    pub(crate) counted: Vec<Vec<Axis>>,
}

impl Line {
    pub(crate) fn new(comm: Box<dyn Communicator>) -> Self {
        Self { comm, counted: Vec::new() }
    }

    /// What traffic over these axes is counted under.
    pub(super) fn tag(&mut self, axes: Vec<Axis>) -> u32 {
        let known = self.counted.iter().position(|counted| *counted == axes);
        known.unwrap_or_else(|| {
            self.counted.push(axes);
            self.counted.len() - 1
        }) as u32
    }
}

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
    use phalanx_comm::Op as Kind;
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
            (Kind::ReduceScatter(Reduction::Sum), blocks)
        }
        CollectiveKind::AllReduce => {
            (Kind::AllReduce(Reduction::Sum), Blocks::contiguous(x.elements()))
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

/// Blocks of a gather along the middle of three dims, for the order in which its elements are
/// dealt.
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
        order => Err(op.unsupported(format!("dim {dim} is {}; only blocks move", order.name()))),
    }
}

/// Who sends to whom in a permute. Blocks are numbered by the old axes on the sending side and by
/// the new ones on the receiving side; where a block has several holders, or several ranks need
/// it, they are matched in the order of the remaining axes.
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

/// A collective as calls of the communicator, made ready when its program is compiled.
pub(crate) struct Transfer {
    /// One for each piece, and the first element that it takes of every block.
    calls: Vec<(usize, Call<'static>)>,
    source: Var,
    target: Var,
    /// Where its handles are kept while it runs as one task.
    outstanding: Outstanding,
}

/// Calls that were started and not yet waited for.
pub(crate) type Outstanding = Mutex<Vec<Handle>>;

fn keep(outstanding: &Outstanding, handle: Handle) {
    outstanding.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
}

fn wait_for(outstanding: &Outstanding, comm: &mut dyn Communicator) -> Result<(), CommError> {
    let mut outstanding = outstanding.lock().unwrap_or_else(PoisonError::into_inner);
    outstanding.drain(..).try_for_each(|handle| comm.wait(handle))
}

impl Transfer {
    fn new(
        op: &Operation<'_>,
        axes: &[Axis],
        kind: phalanx_comm::Op<'static>,
        blocks: Blocks,
        source: Var,
        target: Var,
    ) -> Result<Self, EngineError> {
        let endpoint = op.comm.ok_or_else(|| {
            op.unsupported("other ranks take part; make the engine with CpuEngine::on_rank")
        })?;
        let name = op.instr.op.name();
        let site = Site::named(&format!("{} {name} %{}", op.program.name, op.instr.outputs[0].0));
        let mesh = op.program.mesh();
        let members: Vec<usize> =
            mesh.group(op.rank, axes).into_iter().map(|place| op.ranks[place]).collect();
        let mut line = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        let group = Group::new(members).and_then(|group| line.comm.group(&group));
        let group = group.map_err(|e| op.unsupported(e.to_string()))?;
        // Traffic is counted by the axes that it goes over.
        let tag = line.tag(mesh.axes_of(mesh.mask(axes)));
        let call = Call::new(group, kind, source.dtype, blocks).at(site).tagged(tag);
        Ok(Self { calls: vec![(0, call)], source, target, outstanding: Outstanding::default() })
    }

    /// Calls that move elements between two buffers, or one buffer and other ranks; each with the first
    /// element that it takes.
    pub(super) fn of(calls: Vec<(usize, Call<'static>)>, source: Var, target: Var) -> Self {
        Self { calls, source, target, outstanding: Outstanding::default() }
    }

    /// The same in pieces: of every block each call takes some columns.
    fn cut(mut self, collective: &Collective) -> Self {
        if let ([(_, whole)], true) = (&self.calls[..], collective.pieces > 1) {
            let piece = |columns: Range<usize>| {
                let blocks = Blocks { len: columns.len(), ..whole.blocks };
                (columns.start, Call { blocks, ..*whole })
            };
            self.calls = collective.cuts(whole.blocks.len).map(piece).collect();
        }
        self
    }

    /// Starts every call, and hands over what is to be waited for.
    ///
    /// # Safety
    /// Nobody writes the source or touches the target until all have been waited for.
    pub(crate) unsafe fn start(
        &self,
        cx: &Context<'_>,
        comm: &mut dyn Communicator,
        mut started: impl FnMut(Handle),
    ) -> Result<(), CommError> {
        let (source, target) = (cx.ptr::<u8>(&self.source), cx.ptr::<u8>(&self.target));
        for (first, call) in &self.calls {
            let call = Call { accumulate: cx.adds(&self.target), ..*call };
            let offset = first * call.dtype.size();
            // SAFETY: the planner gave both sides their memory, aligned, of the size that the blocks
            // span, in which the columns lie; the rest is the caller's promise.
            started(unsafe { comm.start(&call, source.add(offset), target.add(offset))? });
        }
        Ok(())
    }

    fn accesses(&self, share: Share) -> Vec<Access> {
        if share.worker > 0 {
            return vec![];
        }
        let target = &self.target;
        vec![self.source.reads_all(), target.writes(0..target.elements())]
    }
}

impl Task for Transfer {
    fn accesses(&self, share: Share) -> Vec<Access> {
        Transfer::accesses(self, share)
    }

    fn run(&self, cx: &Context<'_>) {
        cx.communicate(|comm| {
            // SAFETY: the task declared these accesses, and the calls end with it.
            unsafe { self.start(cx, comm, |handle| keep(&self.outstanding, handle))? };
            wait_for(&self.outstanding, comm)
        });
    }

    fn transfer(&self) -> Option<&Transfer> {
        Some(self)
    }
}

/// Calls that are waited for by another task.
struct Start {
    transfer: Transfer,
    /// Where their handles are kept meanwhile.
    handle: usize,
}

impl Task for Start {
    fn accesses(&self, share: Share) -> Vec<Access> {
        self.transfer.accesses(share)
    }

    fn run(&self, cx: &Context<'_>) {
        cx.communicate(|comm| {
            // SAFETY: the task declared these accesses. Both values live until the task that
            // waits, which declares them again; in between nothing writes the operand, because it
            // is still to be read, and nothing touches the result, because it is not made yet.
            unsafe { self.transfer.start(cx, comm, |h| keep(&cx.handles[self.handle], h)) }
        });
    }
}

/// Waits for started calls.
struct Done {
    source: Var,
    target: Var,
    handle: usize,
}

fn done(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let handle = op.instr.inputs[0];
    let start = op.program.instrs().iter().find(|i| i.outputs.contains(&handle));
    let Some(start) = start else {
        return Err(op.unsupported("what it waits for is started by another program"));
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
        // It was done when it was started.
        true => Ok(vec![]),
        false => Ok(vec![task(Done { source, target, handle: handle.index() })]),
    }
}

impl Task for Done {
    fn accesses(&self, share: Share) -> Vec<Access> {
        if share.worker > 0 {
            return vec![];
        }
        let target = &self.target;
        vec![self.source.reads_all(), target.writes(0..target.elements())]
    }

    fn run(&self, cx: &Context<'_>) {
        cx.communicate(|comm| {
            // Nothing is there if its start failed, which was reported then.
            wait_for(&cx.handles[self.handle], comm)
        });
    }
}

/// The gather of the numbers that an op exchanges inside, each rank's in its place already.
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
        let kind = phalanx_comm::Op::AllGather;
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

impl Context<'_> {
    /// Lets the first worker talk to other ranks. It does so also after a failure of this rank's own,
    /// so that the others are not left waiting; after one between ranks, calls fail at once.
    fn communicate(&self, talk: impl FnOnce(&mut dyn Communicator) -> Result<(), CommError>) {
        let Some(endpoint) = self.comm.filter(|_| self.share.worker == 0) else { return };
        let mut comm = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = talk(comm.comm.as_mut()) {
            self.failure.report(error.to_string());
        }
    }
}
