//! Rotation of heads by their positions. Queries and keys, which follow each other in a program, are turned by one
//! launch: together they keep the memory busy longer, and one wait for the last blocks is saved.

use phalanx_call::Slot;
use phalanx_engine::EngineError;
use phalanx_ir::ops::Rotary;
use phalanx_ir::{DType, Instr, Op, OpDef};

use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source};
use crate::piece::Piece;

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    let Op::Rotary(rotary) = op.instr.op else {
        return Err(op.unsupported("it is no rotation"));
    };
    let own = operands(op, op.instr);
    match pair(op) {
        Some([_, second]) if std::ptr::eq(second, op.instr) => Ok(vec![]),
        Some([_, second]) => {
            let second = operands(op, second);
            Ok(vec![turned(op, &rotary, own, Some(second))?])
        }
        None => Ok(vec![turned(op, &rotary, own, None)?]),
    }
}

fn operands(op: &Operation<'_>, instr: &Instr) -> [Var; 2] {
    [op.var(instr.inputs[0]), op.var(instr.outputs[0])]
}

/// The first two rotations in a row, if this is one of them and they may run at once: only views are between
/// them, they turn by the same angles, and neither touches the memory of the other.
fn pair<'a>(op: &Operation<'a>) -> Option<[&'a Instr; 2]> {
    let instrs = op.program.instrs();
    let at = instrs.iter().position(|instr| std::ptr::eq(instr, op.instr))?;
    let near = |instr: &&Instr| matches!(instr.op, Op::Rotary(_)) || instr.op.is_view();
    let start = at - instrs[..at].iter().rev().take_while(near).count();
    let row = instrs[start..].iter().take_while(near);
    let mut row = row.filter(|instr| matches!(instr.op, Op::Rotary(_)));
    let pair = [row.next()?, row.next()?];
    let [a, b] = pair.map(|instr| operands(op, instr));
    let [first, second] = pair.map(|instr| op.part(instr.inputs[0], 1));
    let piece = |var: &Var| Piece::of(var.slot, var.bytes());
    let meet = |a: &Var, b: &Var| match (piece(a), piece(b)) {
        (Some(a), Some(b)) => a.meets(b),
        _ => true,
    };
    // The first launch writes the second result, which must have its memory by then.
    let is_there = b[1].slot == b[0].slot || matches!(b[1].slot, Slot::Output(_));
    let fits = is_there
        && pair.iter().any(|instr| std::ptr::eq(*instr, op.instr))
        && pair[0].op == pair[1].op
        && first == second
        && [&a[0], &b[0]].iter().all(|x| in_packs(x) && x.rows() > 0)
        && a[0].dtype == b[0].dtype
        && (a[0].shape[1], a[0].shape[3]) == (b[0].shape[1], b[0].shape[3])
        && !a.iter().any(|a| b.iter().any(|b| meet(a, b)));
    fits.then_some(pair)
}

/// Whether a thread can take 16 bytes of each half of a head.
fn in_packs(x: &Var) -> bool {
    let wide = 16 / x.dtype.size();
    x.valid[3] == x.shape[3] && (x.shape[3] / 2).is_multiple_of(wide)
}

fn turned(
    op: &mut Operation<'_>,
    rotary: &Rotary,
    [x, out]: [Var; 2],
    second: Option<[Var; 2]>,
) -> Result<Task, EngineError> {
    let (positions, part) = (x.shape[1], op.part(op.instr.inputs[0], 1));
    let frequencies = rotary.frequencies(x.valid[3]);
    let angles: Vec<f64> = (0..positions)
        .flat_map(|i| frequencies.iter().map(move |f| part.global(i) as f64 * f))
        .collect();
    let cosines = table(op, x.dtype, angles.iter().map(|angle| angle.cos()))?;
    let sines = table(op, x.dtype, angles.iter().map(|angle| angle.sin()))?;
    // Of every head: its pairs, then each element of its padding.
    let each = x.valid[3] / 2 + x.shape[3] - x.valid[3];
    let (wide, half, packs) = (16 / x.dtype.size(), x.shape[3] / 2, in_packs(&x));
    let count = |x: &Var| x.rows() * if packs { half / wide } else { each };
    let mut args = vec![x.arg(), cosines, sines, out.arg(), Arg::Int(count(&x) as i64)];
    args.extend([positions, x.shape[2], x.shape[3]].map(|n| Arg::Int(n as i64)));
    args.extend((!packs).then_some(Arg::Int(x.valid[3] as i64)));
    args.push(Arg::Real(if rotary.inverse { -1.0 } else { 1.0 }));
    let (mut most, mut tensors) = (count(&x), 1);
    if packs {
        let [other, into] = second.as_ref().map_or([Arg::Null, Arg::Null], |pair| {
            (most, tensors) = (most.max(count(&pair[0])), 2);
            [pair[0].arg(), pair[1].arg()]
        });
        let sizes = second.as_ref().map_or([0, 1], |[x, _]| [count(x), x.shape[2]]);
        args.extend([other, into]);
        args.extend(sizes.map(|n| Arg::Int(n as i64)));
    }
    let name = if packs { "rotary_packs" } else { "rotary" };
    let kernel = KernelSpec::of(Source::Rotary, name, &[op.float(x.dtype)?]);
    // A thread takes one pack: more of them in turn are slower.
    let blocks = most.div_ceil(THREADS as usize).clamp(1, 1 << 24) as u32;
    Ok(Task::Kernel(KernelTask::new(kernel, [blocks, tensors, 1], THREADS, args)))
}

/// Numbers in the accumulator of an element type.
fn table(
    op: &mut Operation<'_>,
    dtype: DType,
    numbers: impl Iterator<Item = f64>,
) -> Result<Arg, EngineError> {
    let bytes: Vec<u8> = match dtype.accumulator() {
        DType::F64 => numbers.flat_map(f64::to_ne_bytes).collect(),
        _ => numbers.flat_map(|x| (x as f32).to_ne_bytes()).collect(),
    };
    op.engine.constant(&bytes)
}
