//! Collectives: what ranks do together, as calls of the engine's communicator.
//!
//! Data go directly from one rank's arena to another's, in strided blocks. A collective without
//! other ranks is an ordinary copy.

use phalanx_call::Slot;
use phalanx_comm::{Blocks, PlacedCall, PlannedCollective};
use phalanx_engine::EngineError;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{DType, Exchange};

use super::movement::{self, Kind};
use super::transfer::{Done, Start, Transfer};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, task};

pub(super) fn compile(op: &Operation<'_>, collective: &Collective) -> Result<Tasks, EngineError> {
    if collective.kind == CollectiveKind::Done {
        return done(op);
    }
    let (x, out) = (op.input(0), op.output(0));
    let planned = PlannedCollective::of(op.program, op.instr, collective, op.rank);
    let only = match planned.map_err(|why| op.unsupported(why))? {
        PlannedCollective::Zeros => movement::moved(Kind::Fill(0.0), vec![], &out),
        PlannedCollective::Copy => movement::copy(x, out),
        PlannedCollective::Slice { dim, start } => {
            movement::moved(Kind::Slice { dim, start }, vec![x], &out)
        }
        PlannedCollective::Pick { dim, places } => {
            movement::moved(Kind::Pick { dim, places }, vec![x], &out)
        }
        PlannedCollective::Dealt { dim, places, axes, op: kind, blocks } => {
            if collective.start {
                return Err(op.unsupported("elements are picked, so it cannot only be started"));
            }
            let calls = op.plan(|endpoint, at| endpoint.calls(at, collective, &axes, kind, blocks));
            return dealt(op, (dim, places), Transfers { calls: calls?, x, out });
        }
        PlannedCollective::Put { dim, start } => {
            let mut tasks = kept(op, &out);
            tasks.push(movement::moved(Kind::Put { dim, start }, vec![x], &out));
            return Ok(tasks);
        }
        PlannedCollective::Given { axes, op: kind, blocks } => {
            let rest = op.instr.inputs.len() > 1;
            if collective.start && !rest {
                return Err(op.unsupported("it ends with zeros, so it cannot only be started"));
            }
            let calls = op.plan(|endpoint, at| endpoint.calls(at, collective, &axes, kind, blocks));
            let given = Transfer::of(calls?, x, out.clone());
            let mut tasks = if rest { kept(op, &out) } else { vec![] };
            tasks.push(match collective.start {
                true => task(Start { transfer: given, handle: op.instr.outputs[0].index() }),
                false => task(given),
            });
            if !rest {
                tasks.push(movement::moved(Kind::Fill(0.0), vec![], &out));
            }
            return Ok(tasks);
        }
        PlannedCollective::Rows(rows) => {
            let calls = op.plan(|endpoint, at| {
                endpoint.calls(at, collective, &rows.axes, rows.op(), rows.blocks)
            });
            let transfer = Transfer::of(calls?, x, out).of_rows(rows, op.input(1));
            match collective.start {
                false => task(transfer),
                true => task(Start { transfer, handle: op.instr.outputs[0].index() }),
            }
        }
        PlannedCollective::Calls { axes, op: kind, blocks } => {
            let calls = op.plan(|endpoint, at| endpoint.calls(at, collective, &axes, kind, blocks));
            let transfer = Transfer::of(calls?, x, out);
            match collective.start {
                false => task(transfer),
                true => task(Start { transfer, handle: op.instr.outputs[0].index() }),
            }
        }
    };
    Ok(vec![only])
}

/// What a block is put into, where it does not lie there yet.
fn kept(op: &Operation<'_>, out: &Var) -> Tasks {
    let rest = op.input(1);
    match rest.slot == out.slot {
        true => vec![],
        false => vec![movement::copy(rest, out.clone())],
    }
}

/// Calls between two values.
struct Transfers {
    calls: Vec<PlacedCall>,
    x: Var,
    out: Var,
}

/// A gather or scatter in blocks, with the order of elements changed after or before it, in the
/// instruction's scratch memory.
fn dealt(
    op: &Operation<'_>,
    (dim, places): (usize, Vec<usize>),
    Transfers { calls, x, out }: Transfers,
) -> Result<Tasks, EngineError> {
    let at = op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
    let gathers = x.elements() < out.elements();
    let shape = if gathers { out.shape.clone() } else { x.shape.clone() };
    let between = Var { slot: Slot::Workspace(at), dtype: x.dtype, valid: shape.clone(), shape };
    let pick = Kind::Pick { dim, places };
    Ok(match gathers {
        true => vec![
            task(Transfer::of(calls, x, between.clone())),
            movement::moved(pick, vec![between], &out),
        ],
        false => {
            vec![movement::moved(pick, vec![x], &between), task(Transfer::of(calls, between, out))]
        }
    })
}

fn done(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let handle = op.instr.inputs[0];
    let elsewhere =
        || op.unsupported("the collective that it waits for is started in another program");
    match PlannedCollective::ends_at_start(op.program, handle).ok_or_else(elsewhere)? {
        true => Ok(vec![]),
        false => {
            let start = op.program.instrs().iter().find(|i| i.outputs.contains(&handle));
            let source = op.var(start.ok_or_else(elsewhere)?.inputs[0]);
            let target = op.output(0);
            Ok(vec![task(Done { source, target, handle: handle.index() })])
        }
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
        let call =
            op.plan(|endpoint, at| endpoint.call(at, &exchange.axes, kind, exchange.dtype, blocks));
        Ok(Self(Transfer::of(vec![(0, call?)], own, all)))
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
