//! What ranks do together: calls of a transport of the host's memory.
//!
//! Ranks that share a GPU, or have one each, exchange through the host: what a rank gives is copied
//! there, the transport moves it, and what it gets is copied back. So every transport serves, sums
//! are in the order of the ranks, and traffic is counted as everywhere.

use phalanx_call::{Message, Slot};
use phalanx_comm::{
    Blocks, CallSite, CollectiveOp, CommError, CountedEndpoint, OpKind, PlacedCall,
    PlannedCollective, PlannedRows,
};
use phalanx_engine::{EngineError, Way};
use phalanx_ir::Exchange;
use phalanx_ir::ops::{Collective, CollectiveKind};

use super::movement::{filled, picked, put, sliced};
use super::{Operation, Place, Task, Tasks, Var, copy};

/// A collective as calls of the transport, prepared when its program is compiled.
pub(crate) struct Transfer {
    pub(crate) calls: Vec<PlacedCall>,
    /// What is given, and how many bytes; nothing if it only receives.
    pub(crate) source: Option<(Place, Extent)>,
    /// What is received into; nothing if it only sends.
    pub(crate) target: Option<(Place, Extent)>,
    /// Whether the calls write only a part of the target.
    pub(crate) partly: bool,
}

impl Transfer {
    /// Calls from all of one value to all of another.
    fn of(calls: Vec<PlacedCall>, from: &Var, to: &Var) -> Self {
        Self {
            calls,
            source: Some((from.place(), Extent::Bytes(from.bytes()))),
            target: Some((to.place(), Extent::Bytes(to.bytes()))),
            partly: false,
        }
    }

    /// Whether it is between two ranks, not of a group.
    pub(crate) fn is_message(&self) -> bool {
        let message = |kind| matches!(kind, OpKind::Send | OpKind::Receive);
        self.calls.iter().any(|(_, call)| message(call.op.kind()))
    }
}

/// How many bytes a side of a transfer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    Bytes(usize),
    /// All of the buffer that the call is bound to.
    Bound,
}

pub(super) fn compile(
    op: &mut Operation<'_>,
    collective: &Collective,
) -> Result<Tasks, EngineError> {
    if collective.kind == CollectiveKind::Done {
        return done(op);
    }
    let (x, out) = (op.input(0), op.output(0));
    let planned = PlannedCollective::of(op.program, op.instr, collective, op.rank);
    Ok(match planned.map_err(|why| op.unsupported(why))? {
        PlannedCollective::Zeros => vec![filled(op, &out, 0.0)?],
        PlannedCollective::Copy => vec![copy(&*op.engine, &x, &out)],
        PlannedCollective::Slice { dim, start } => sliced(op, &x, &out, dim, start),
        PlannedCollective::Pick { dim, places } => vec![picked(op, &x, &out, dim, &places)?],
        PlannedCollective::Dealt { dim, places, axes, op: kind, blocks } => {
            if collective.start {
                return Err(op.unsupported("elements are picked, so it cannot only be started"));
            }
            let calls = plan(op, |line, at| line.calls(at, collective, &axes, kind, blocks))?;
            dealt(op, (dim, &places), calls, [x, out])?
        }
        PlannedCollective::Put { dim, start } => {
            let mut tasks = kept(op, &out);
            tasks.push(put(op, &x, &out, dim, start));
            tasks
        }
        PlannedCollective::Given { axes, op: kind, blocks } => {
            let rest = op.instr.inputs.len() > 1;
            if collective.start && !rest {
                return Err(op.unsupported("it ends with zeros, so it cannot only be started"));
            }
            let calls = plan(op, |line, at| line.calls(at, collective, &axes, kind, blocks))?;
            let mut given = Transfer::of(calls, &x, &out);
            given.target = None;
            let mut tasks = if rest { kept(op, &out) } else { vec![] };
            tasks.push(match collective.start {
                true => Task::Start(given, op.instr.outputs[0].index()),
                false => Task::Transfer(given),
            });
            if !rest {
                tasks.push(filled(op, &out, 0.0)?);
            }
            tasks
        }
        // The host does not know the counts, so regions travel whole: what lies behind the rows is zero on both sides.
        PlannedCollective::Rows(PlannedRows { axes, blocks, .. }) => {
            let kind = CollectiveOp::AllToAll;
            let calls = plan(op, |line, at| line.calls(at, collective, &axes, kind, blocks))?;
            started(op, collective, Transfer::of(calls, &x, &out))
        }
        PlannedCollective::Calls { axes, op: kind, blocks } => {
            let calls = plan(op, |line, at| line.calls(at, collective, &axes, kind, blocks))?;
            started(op, collective, Transfer::of(calls, &x, &out))
        }
    })
}

/// A transfer that ends here, or that is only started.
fn started(op: &Operation<'_>, collective: &Collective, transfer: Transfer) -> Tasks {
    match collective.start {
        false => vec![Task::Transfer(transfer)],
        true => vec![Task::Start(transfer, op.instr.outputs[0].index())],
    }
}

/// What a block is put into, where it does not lie there yet.
fn kept(op: &Operation<'_>, out: &Var) -> Tasks {
    let rest = op.input(1);
    match rest.slot == out.slot {
        true => vec![],
        false => vec![copy(&*op.engine, &rest, out)],
    }
}

/// A gather or scatter in blocks, with the order of elements changed after or before it, in the
/// instruction's scratch memory.
fn dealt(
    op: &mut Operation<'_>,
    (dim, places): (usize, &[usize]),
    calls: Vec<PlacedCall>,
    [x, out]: [Var; 2],
) -> Result<Tasks, EngineError> {
    let gathers = x.elements() < out.elements();
    let shape = if gathers { out.shape.clone() } else { x.shape.clone() };
    let Place { slot, .. } = op.scratch_at(0)?;
    let between = Var { slot, dtype: x.dtype, valid: shape.clone(), shape };
    Ok(match gathers {
        true => vec![
            Task::Transfer(Transfer::of(calls, &x, &between)),
            picked(op, &between, &out, dim, places)?,
        ],
        false => vec![
            picked(op, &x, &between, dim, places)?,
            Task::Transfer(Transfer::of(calls, &between, &out)),
        ],
    })
}

fn done(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let handle = op.instr.inputs[0];
    let elsewhere =
        || op.unsupported("the collective that it waits for is started in another program");
    match PlannedCollective::ends_at_start(op.program, handle).ok_or_else(elsewhere)? {
        true => Ok(vec![]),
        false => Ok(vec![Task::Done(handle.index())]),
    }
}

/// The gather of the numbers that an op exchanges inside, at an offset of its scratch memory.
pub(super) fn gather(
    op: &mut Operation<'_>,
    exchange: &Exchange,
    offset: usize,
) -> Result<Transfer, EngineError> {
    let (mesh, elements) = (op.program.mesh(), exchange.elements());
    let all = op.scratch_at(offset)?;
    let bytes = elements * exchange.dtype.size();
    let own = all.add(mesh.shard(op.rank, &exchange.axes) * bytes);
    let total = bytes * mesh.count(&exchange.axes);
    let (kind, blocks) = (CollectiveOp::AllGather, Blocks::contiguous(elements));
    let call = plan(op, |line, at| line.call(at, &exchange.axes, kind, exchange.dtype, blocks))?;
    Ok(Transfer {
        calls: vec![(0, call)],
        source: Some((own, Extent::Bytes(bytes))),
        target: Some((all, Extent::Bytes(total))),
        partly: false,
    })
}

/// Messages to or from ranks of other stages, as one buffer's.
pub(crate) fn message(
    endpoint: &mut CountedEndpoint,
    messages: &[Message],
    way: Way,
    label: &str,
) -> Transfer {
    let calls = endpoint.messages(messages, way == Way::Send, label);
    let buffer = |slot| Some((Place { slot, offset: 0 }, Extent::Bound));
    let (source, target) = match way {
        Way::Send => (buffer(Slot::Input(0)), None),
        Way::Receive => (None, buffer(Slot::Output(0))),
    };
    Transfer { calls, source, target, partly: true }
}

/// Asks the endpoint to prepare calls of this instruction.
pub(super) fn plan<R>(
    op: &mut Operation<'_>,
    plan: impl FnOnce(&mut CountedEndpoint, CallSite<'_>) -> Result<R, CommError>,
) -> Result<R, EngineError> {
    let (program, instr, rank, ranks) = (op.program, op.instr, op.rank, op.ranks);
    let Some(line) = op.engine.endpoint() else {
        let why = "other ranks take part; make the engine with CudaEngine::on_rank";
        return Err(op.unsupported(why));
    };
    let planned = plan(line, CallSite { program, instr, rank, ranks });
    planned.map_err(|e| op.unsupported(e.to_string()))
}
