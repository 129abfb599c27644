//! Attention: by the library where it has kernels, otherwise by our own in every element type.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Attention, AttentionKind};
use phalanx_ir::{DType, Op};

use super::position::{mask_words, part_words};
use super::{Arg, KernelTask, Operation, Place, Task, Tasks, Var};
use crate::fused_attention::{FusedCall, FusedShape};
use crate::kernels::{KernelSpec, MOST_SHARED, Source};

/// Warps of a block, as the kernels have it.
const WARPS: usize = 8;

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    let (attention, backward) = match op.instr.op {
        Op::Attention(a) => (a, false),
        Op::AttentionGrad(g) => (g.of, true),
        _ => return Err(op.unsupported("it is not an attention")),
    };
    let inputs = op.inputs();
    let (q, k) = (&inputs[0], &inputs[1]);
    if q.valid[3] < q.shape[3] {
        return Err(
            op.unsupported("the elements of a head cannot be padded; pad the number of heads")
        );
    }
    if q.elements() == 0 || k.elements() == 0 {
        return Ok(vec![]);
    }
    if let Some(call) = fused(op, &attention, backward, &inputs)? {
        return Ok(vec![Task::Attention(Box::new(call))]);
    }
    let words = Arg::Words(attend(op, &attention, q, k));
    match backward {
        false => forward(op, &attention, &inputs, words),
        true => gradient(op, &attention, &inputs, words),
    }
}

/// The library's attention, where it has one: in bf16, causal over whole sequences, without dropout.
fn fused(
    op: &mut Operation<'_>,
    attention: &Attention,
    backward: bool,
    inputs: &[Var],
) -> Result<Option<FusedCall>, EngineError> {
    let (q, k) = (&inputs[0], &inputs[1]);
    let whole = |var: &Var| var.valid == var.shape;
    let shape = FusedShape {
        batch: q.shape[0],
        positions: q.shape[1],
        heads: q.shape[2],
        groups: k.shape[2],
        size: q.shape[3],
        backward,
    };
    let fits = q.dtype == DType::Bf16
        && attention.kind == AttentionKind::Flash
        && attention.causal
        && !attention.drops()
        && q.shape[1] == k.shape[1]
        && op.part(op.instr.inputs[0], 1).shards == 1
        && whole(q)
        && whole(k)
        && shape.is_supported();
    let Some(plan) = fits.then(|| op.engine.attention(&shape)).flatten() else {
        return Ok(None);
    };
    let results = op.outputs();
    let mut operands: Vec<Place> = inputs.iter().chain(&results).map(Var::place).collect();
    if backward {
        operands.push(op.scratch_at(0)?);
    }
    Ok(Some(FusedCall::new(plan, operands)))
}

/// Sizes, masks and which part of the attention this rank holds (`Attend`).
fn attend(op: &Operation<'_>, attention: &Attention, q: &Var, k: &Var) -> Vec<i64> {
    let value = op.instr.inputs[0];
    // Padding of the major factor of the query heads is also padding of the key heads, and does no
    // harm; with one key head, the heads of its group may be padded.
    let group = if k.shape[2] == 1 { q.valid[2] } else { q.shape[2] / k.shape[2].max(1) };
    let sizes = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]];
    let mut words: Vec<i64> = sizes.iter().map(|&n| n as i64).collect();
    words.extend([i64::from(attention.causal), i64::from(attention.drops())]);
    words.push((1.0 / (q.shape[3] as f64).sqrt()).to_bits() as i64);
    let valid = [op.program.ty(value).shape[1], k.valid[1], q.valid[1], group];
    words.extend(valid.map(|n| n as i64));
    words.extend([0, 1, 2].into_iter().flat_map(|dim| part_words(op.part(value, dim))));
    words.extend(mask_words(attention.dropout, attention.site));
    words
}

/// An instance of a kernel for heads of this size.
fn kernel(op: &Operation<'_>, name: &str, q: &Var) -> Result<KernelSpec, EngineError> {
    let lanes = match q.shape[3] {
        0..=32 => "1",
        33..=64 => "2",
        65..=128 => "4",
        129..=256 => "8",
        size => return Err(op.unsupported(format!("heads of {size} elements are too large"))),
    };
    Ok(KernelSpec::of(Source::Attention, name, &[op.float(q.dtype)?, lanes]))
}

/// A launch with a warp for each of `rows` of a sequence and head, and `tiles` of so many elements of
/// shared memory.
fn launch(
    op: &Operation<'_>,
    (name, q): (&str, &Var),
    [rows, heads, batch]: [usize; 3],
    shared: usize,
    args: Vec<Arg>,
) -> Result<Task, EngineError> {
    let bytes = shared * q.dtype.accumulator().size();
    if bytes > MOST_SHARED as usize {
        let size = q.shape[3];
        return Err(op.unsupported(format!("heads of {size} {} are too large", q.dtype)));
    }
    let blocks = [rows.div_ceil(WARPS) as u32, heads as u32, batch as u32];
    let task = KernelTask::new(kernel(op, name, q)?, blocks, 32 * WARPS as u32, args);
    Ok(Task::Kernel(task.sharing(bytes)))
}

fn forward(
    op: &Operation<'_>,
    attention: &Attention,
    inputs: &[Var],
    words: Arg,
) -> Result<Tasks, EngineError> {
    let (q, outputs) = (&inputs[0], op.outputs());
    let key = inputs.get(3).map_or(Arg::Null, Var::arg);
    let kept = |i: usize| outputs.get(i).map_or(Arg::Null, Var::arg);
    let statistics = match attention.kind {
        AttentionKind::Flash => [kept(1), Arg::Null, Arg::Null],
        AttentionKind::Materialised => [Arg::Null, kept(1), kept(2)],
    };
    let mut args = vec![q.arg(), inputs[1].arg(), inputs[2].arg(), key, outputs[0].arg()];
    args.extend(statistics);
    args.push(words);
    let size = q.shape[3];
    let shared = 32 * (size + 1) + 32 * size + WARPS * size;
    let grid = [q.shape[1], q.shape[2], q.shape[0]];
    Ok(vec![launch(op, ("attention", q), grid, shared, args)?])
}

fn gradient(
    op: &Operation<'_>,
    attention: &Attention,
    inputs: &[Var],
    words: Arg,
) -> Result<Tasks, EngineError> {
    let (q, k, outputs) = (&inputs[0], &inputs[1], op.outputs());
    let last = inputs.len() - 1 - usize::from(attention.drops());
    let dy = &inputs[last];
    let key = if attention.drops() { inputs[last + 1].arg() } else { Arg::Null };
    let [lse, probabilities, dropped] = match attention.kind {
        AttentionKind::Flash => [inputs[4].arg(), Arg::Null, Arg::Null],
        AttentionKind::Materialised => {
            let dropped = attention.drops().then(|| inputs[5].arg());
            [Arg::Null, inputs[4].arg(), dropped.unwrap_or(Arg::Null)]
        }
    };
    let delta = Arg::Pointer(op.scratch_at(0)?);
    let rows = q.shape[0] * q.shape[1] * q.shape[2];
    let kernel = KernelSpec::of(Source::Attention, "attention_delta", &[op.float(q.dtype)?]);
    let args = vec![inputs[3].arg(), dy.arg(), delta.clone(), words.clone()];
    let mut tasks = vec![op.over(rows * 32, kernel, args)];
    let operands = || vec![q.arg(), k.arg(), inputs[2].arg(), key.clone(), dy.arg()];
    let size = q.shape[3];
    let shared = 2 * 32 * (size + 1) + 2 * WARPS * size;
    let mut args = operands();
    args.extend([lse.clone(), probabilities.clone(), delta.clone(), outputs[0].arg()]);
    args.push(words.clone());
    let grid = [q.shape[1], q.shape[2], q.shape[0]];
    tasks.push(launch(op, ("attention_grad_queries", q), grid, shared, args)?);
    let mut args = operands();
    args.extend([lse, probabilities, dropped, delta, outputs[1].arg(), outputs[2].arg(), words]);
    let grid = [k.shape[1], k.shape[2], q.shape[0]];
    tasks.push(launch(op, ("attention_grad_keys", q), grid, shared, args)?);
    Ok(tasks)
}
