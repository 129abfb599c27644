//! Choices of experts, places of tokens, and rows that go there and come back.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Deal, Queue};
use phalanx_ir::{Op, ValueId};

use super::{Arg, Operation, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match op.instr.op.clone() {
        Op::TopK(_) => top_k(op),
        Op::TopKGrad(_) => top_k_grad(op),
        Op::Assign(of) => assign(op, of.experts, of.capacity),
        Op::Queue(of) => queue(op, of),
        Op::Deal(of) => deal(op, &of),
        Op::Histogram(of) => histogram(op, of.size, of.per),
        Op::Dispatch(_) => dispatch(op),
        Op::Combine(_) => combine(op),
        Op::GateGrad(_) => gate_grad(op),
        _ => Err(op.unsupported("it does not route")),
    }
}

/// Threads that share the work of one choice or token.
const WARP: usize = 32;

fn ints<const N: usize>(numbers: [usize; N]) -> [Arg; N] {
    numbers.map(|n| Arg::Int(n as i64))
}

fn kernel(op: &Operation<'_>, name: &str, of: &Var) -> Result<KernelSpec, EngineError> {
    Ok(KernelSpec::of(Source::Routing, name, &[op.float(of.dtype)?]))
}

fn top_k(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, values, index) = (op.input(0), op.output(0), op.output(1));
    let mut args = vec![x.arg(), values.arg(), index.arg()];
    args.extend(ints([x.rows(), x.width(), x.valid_width(), values.width(), values.valid_width()]));
    Ok(vec![op.over(x.rows(), kernel(op, "top_k", &x)?, args)])
}

fn top_k_grad(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (index, dy, dx) = (op.input(0), op.input(1), op.output(0));
    let mut args = vec![index.arg(), dy.arg(), dx.arg()];
    args.extend(ints([dx.elements(), dx.width(), dy.width(), dy.valid_width()]));
    Ok(vec![op.over(dx.elements(), kernel(op, "top_k_grad", &dx)?, args)])
}

/// The tokens and choices of a group (`Choices`), and how many groups there are.
fn choices(slots: &Var) -> (Arg, usize) {
    let dims = slots.shape.len();
    let words = [dims - 2, dims - 1].map(|i| [slots.shape[i] as i64, slots.valid[i] as i64]);
    (Arg::Words(words.concat()), slots.shape[..dims - 2].iter().product())
}

/// An operand that may be left out.
fn optional(op: &Operation<'_>, i: usize) -> Arg {
    if op.instr.inputs.len() > i { op.input(i).arg() } else { Arg::Null }
}

fn assign(op: &Operation<'_>, experts: usize, capacity: usize) -> Result<Tasks, EngineError> {
    let (index, slots) = (op.input(0), op.output(0));
    let (of, groups) = choices(&index);
    let mut args = vec![index.arg(), optional(op, 1), slots.arg(), Arg::Int(groups as i64), of];
    args.extend(ints([experts, capacity]));
    let kernel = KernelSpec::of(Source::Routing, "assign", &["u8"]);
    Ok(vec![op.over(groups * (experts + 1) * WARP, kernel, args)])
}

fn queue(op: &Operation<'_>, queue: Queue) -> Result<Tasks, EngineError> {
    let (index, slots, counts) = (op.input(0), op.output(0), op.output(1));
    let (of, groups) = choices(&index);
    let part = op.part(op.instr.outputs[1], 0);
    let first = part.start().ok_or_else(|| op.unsupported("parts are not sharded in blocks"))?;
    let mut args = vec![index.arg(), optional(op, 1), slots.arg(), counts.arg()];
    args.extend([Arg::Int(groups as i64), of]);
    let stride = counts.width();
    args.extend(ints([queue.experts, queue.parts, queue.room, first, part.len(), stride]));
    let kernel = KernelSpec::of(Source::Routing, "queue", &["u8"]);
    Ok(vec![op.over(groups * (queue.experts + 1) * WARP, kernel, args)])
}

fn deal(op: &Operation<'_>, of: &Deal) -> Result<Tasks, EngineError> {
    let (numbers, out) = (op.input(0), op.output(0));
    let mut args = vec![numbers.arg(), out.arg()];
    args.extend(ints([out.elements(), of.experts, of.parts, of.per]));
    Ok(vec![op.over(out.elements(), KernelSpec::of(Source::Routing, "deal", &["int"]), args)])
}

fn histogram(op: &Operation<'_>, size: usize, per: usize) -> Result<Tasks, EngineError> {
    let (numbers, out) = (op.input(0), op.output(0));
    let part = op.part(op.instr.outputs[0], out.shape.len() - 1);
    let first = part.start();
    let first = first.ok_or_else(|| op.unsupported("counts are not sharded in blocks"))?;
    let (of, groups) = choices(&numbers);
    let mut args = vec![numbers.arg(), out.arg(), Arg::Int(groups as i64), of];
    args.extend(ints([per, size, first, out.width()]));
    Ok(vec![op.over(out.elements() * WARP, kernel(op, "histogram", &out)?, args)])
}

/// How dispatched rows lie here (`Cells`).
fn cells(op: &Operation<'_>, value: ValueId) -> Result<Arg, EngineError> {
    let (whole, here, part) = (&op.program.ty(value).shape, op.var(value), op.part(value, 0));
    let first = part.start().ok_or_else(|| op.unsupported("experts are not sharded in blocks"))?;
    let dims = whole.len();
    let groups = here.shape[1..dims - 2].iter().product();
    let numbers = [whole[0], whole[dims - 2], first, part.len(), groups, here.shape[dims - 2]];
    Ok(Arg::Words(numbers.map(|n| n as i64).to_vec()))
}

fn dispatch(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, slots, out) = (op.input(0), op.input(1), op.output(0));
    let mut args = vec![x.arg(), slots.arg(), optional(op, 2), out.arg()];
    args.extend(ints([slots.elements(), x.width()]));
    args.extend([choices(&slots).0, cells(op, op.instr.outputs[0])?]);
    let clear = Task::Clear { to: out.place(), bytes: out.bytes() };
    let kernel = kernel(op, "dispatch", &x)?;
    Ok(vec![clear, op.over(slots.elements() * WARP, kernel, args)])
}

fn combine(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (y, slots, out) = (op.input(0), op.input(1), op.output(0));
    let mut args = vec![y.arg(), slots.arg(), optional(op, 2), out.arg()];
    args.extend(ints([out.rows(), out.width()]));
    args.extend([choices(&slots).0, cells(op, op.instr.inputs[0])?]);
    Ok(vec![op.over(out.rows() * WARP, kernel(op, "combine", &y)?, args)])
}

fn gate_grad(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (rows, y, slots, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let mut args = vec![rows.arg(), y.arg(), slots.arg(), out.arg()];
    args.extend(ints([slots.elements(), rows.width(), rows.valid_width()]));
    args.extend([choices(&slots).0, cells(op, op.instr.inputs[1])?]);
    Ok(vec![op.over(slots.elements() * WARP, kernel(op, "gate_grad", &y)?, args)])
}
