//! Optimizer updates over flat units, and ops over the members of a unit.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Bounds, Decay};
use phalanx_ir::{DType, Op};

use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match op.instr.op.clone() {
        Op::AdamW(adamw) => {
            let mut own = [adamw.beta1, adamw.beta2, adamw.eps].map(Arg::Real).to_vec();
            own.push(Arg::Int(i64::from(adamw.coupled)));
            update(op, "adamw", 2, true, &own, adamw.decay)
        }
        Op::LambDirection(lamb) => {
            let own = [lamb.beta1, lamb.beta2, lamb.eps].map(Arg::Real);
            update(op, "lamb_direction", 2, true, &own, lamb.decay)
        }
        Op::Lion(lion) => {
            let own = [lion.beta1, lion.beta2].map(Arg::Real);
            update(op, "lion", 1, false, &own, lion.decay)
        }
        Op::Sgd(sgd) => {
            let own = [Arg::Real(sgd.momentum), Arg::Int(i64::from(sgd.nesterov))];
            update(op, "sgd", 1, false, &own, sgd.decay)
        }
        Op::MemberSquares(of) => squares(op, &of.bounds),
        Op::MemberScale(of) => scale(op, &of.bounds),
        _ => Err(op.unsupported("it is not an update")),
    }
}

/// An update with so many states; some rules use the number of the step.
fn update(
    op: &Operation<'_>,
    name: &str,
    states: usize,
    counts_steps: bool,
    own: &[Arg],
    decay: Decay,
) -> Result<Tasks, EngineError> {
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let (w, g) = (&inputs[0], &inputs[1]);
    // Lower halves of masters come after the gradient, and after the new weights.
    let split = inputs[2].dtype == DType::U16;
    let (ins, outs) = (2 + usize::from(split), 1 + usize::from(split));
    let copy = outputs.get(outs + states);
    let narrow = copy.map_or(w.dtype, |var| var.dtype);
    let types = [op.float(w.dtype)?, op.float(g.dtype)?, op.float(narrow)?];
    if w.dtype != w.dtype.accumulator() && !split {
        return Err(op.unsupported(format!("weights of {} need a master copy", w.dtype)));
    }
    // w, g, the states, then lr, step and clip; and whether anything changes, if it is asked.
    let [lr, step, clip] = std::array::from_fn(|i| &inputs[ins + states + i]);
    let mut args = vec![w.arg(), g.arg()];
    let lower = |vars: &[Var]| if split { vars[1].arg() } else { Arg::Null };
    let moves = !matches!(op.instr.op, Op::LambDirection(_));
    args.extend(moves.then(|| lower(&inputs[1..])));
    args.extend(inputs[ins..ins + states].iter().map(|var| var.arg()));
    args.push(lr.arg());
    args.extend(counts_steps.then(|| step.arg()));
    args.push(clip.arg());
    args.push(inputs.get(ins + states + 3).map_or(Arg::Null, |var| var.arg()));
    args.push(outputs[0].arg());
    args.extend(moves.then(|| lower(&outputs)));
    args.extend(outputs[outs..outs + states].iter().map(|var| var.arg()));
    args.push(copy.map_or(Arg::Null, |var| var.arg()));
    args.push(Arg::Int(w.elements() as i64));
    args.extend(own.iter().cloned());
    let first = op.first_element(op.instr.inputs[0])?;
    let numbers = [first, decay.first, decay.block].map(|n| n as i64);
    args.push(Arg::Words([&[decay.rate.to_bits() as i64][..], &numbers].concat()));
    let kernel = KernelSpec::of(Source::Update, name, &types);
    let threads = THREADS as usize;
    let blocks = match &op.instr.op {
        // Two packs of four elements of each thread, as the kernel has it.
        Op::AdamW(_) => w.elements().div_ceil(8 * threads) as u32,
        _ => (op.engine.blocks() / 4).min(w.elements().div_ceil(threads) as u32),
    };
    Ok(vec![Task::Kernel(KernelTask::new(kernel, [blocks.max(1), 1, 1], THREADS, args))])
}

/// The pieces of the first `count` elements that this rank holds: first element, end, member (or −1).
fn pieces(op: &Operation<'_>, bounds: &Bounds, count: usize) -> Result<Vec<i64>, EngineError> {
    let first = op.first_element(op.instr.inputs[0])?;
    let (mut found, mut at) = (Vec::new(), 0);
    while at < count {
        let (member, same) = bounds.at(first + at);
        let end = count.min(at + same);
        found.extend([at as i64, end as i64, member.map_or(-1, |m| m as i64)]);
        at = end;
    }
    Ok(found)
}

fn squares(op: &mut Operation<'_>, bounds: &Bounds) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let found = pieces(op, bounds, x.valid[0])?;
    let count = Arg::Int(found.len() as i64 / 3);
    let list = constant(op, &found)?;
    let kernel = KernelSpec::of(Source::Update, "member_squares", &[op.float(x.dtype)?]);
    let args = vec![x.arg(), out.arg(), list, count, out.adds()];
    let blocks = [out.elements().max(1) as u32, 1, 1];
    Ok(vec![Task::Kernel(KernelTask::new(kernel, blocks, THREADS, args))])
}

fn scale(op: &mut Operation<'_>, bounds: &Bounds) -> Result<Tasks, EngineError> {
    let (x, factors, out) = (op.input(0), op.input(1), op.output(0));
    // Padding is written too, as by every op that works on elements.
    let found = pieces(op, bounds, x.elements())?;
    let rows = found.len() / 3;
    if rows == 0 {
        return Ok(vec![]);
    }
    if rows > 65_535 {
        return Err(op.unsupported(format!("a unit of {rows} pieces has too many members")));
    }
    let list = constant(op, &found)?;
    let kernel = KernelSpec::of(Source::Update, "member_scale", &[op.float(x.dtype)?]);
    let longest = found.chunks(3).map(|p| (p[1] - p[0]) as usize).max().unwrap_or(1);
    let across = longest.div_ceil(THREADS as usize).clamp(1, 64);
    let args = vec![x.arg(), factors.arg(), out.arg(), list];
    let blocks = [across as u32, rows as u32, 1];
    Ok(vec![Task::Kernel(KernelTask::new(kernel, blocks, THREADS, args))])
}

/// Numbers that the engine keeps.
pub(super) fn constant(op: &mut Operation<'_>, words: &[i64]) -> Result<Arg, EngineError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    op.engine.constant(&bytes)
}
