//! Attention: by the library where it has kernels, otherwise by our own in every element type. Steps of an
//! attention whose keys come in parts run on the same kernels of ours.

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::{Attention, AttentionKind};

use super::position::{mask_words, part_words};
use super::{Arg, KernelTask, Operation, Place, Task, Tasks, Var};
use crate::fused_attention::{FusedCall, FusedShape};
use crate::kernels::{KernelSpec, MOST_SHARED, Source};

/// Warps of a block, as the kernels have it.
const WARPS: usize = 8;

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    // A step goes on from earlier ones, or not.
    let (attention, backward, step) = match op.instr.op {
        Op::Attention(a) => (a, false, None),
        Op::AttentionGrad(g) => (g.of, true, None),
        Op::Attend(a) => (a.of, false, Some(a.goes_on)),
        Op::AttendGrad(g) => (g.of, true, Some(g.goes_on)),
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
    if step.is_none()
        && let Some(call) = fused(op, backward, &inputs)?
    {
        return Ok(vec![Task::Attention(Box::new(call))]);
    }
    let words = Arg::Words(attend(op, &attention, q, k));
    let own = Own { attention, goes_on: step == Some(true), inputs, words };
    match backward {
        false => own.forward(op),
        true => own.gradient(op),
    }
}

/// The library's attention, where it has one.
fn fused(
    op: &mut Operation<'_>,
    backward: bool,
    inputs: &[Var],
) -> Result<Option<FusedCall>, EngineError> {
    let whole = |var: &Var| var.valid == var.shape;
    let shape = FusedShape::of(op.program, op.instr);
    let shape = shape.filter(|_| whole(&inputs[0]) && whole(&inputs[1]));
    let Some(shape) = shape else { return Ok(None) };
    let Some(plan) = op.engine.attention(&shape)? else { return Ok(None) };
    let results = op.outputs();
    let mut operands: Vec<Place> = inputs.iter().chain(&results).map(Var::place).collect();
    if backward {
        operands.push(op.scratch_at(0)?);
    }
    Ok(Some(FusedCall::new(plan, op.scratch_at(shape.per_query())?, operands)))
}

/// Sizes, masks and which part of the attention this rank holds (`Attend`).
fn attend(op: &Operation<'_>, attention: &Attention, q: &Var, k: &Var) -> Vec<i64> {
    let (value, key) = (op.instr.inputs[0], op.instr.inputs[1]);
    // Padding of the major factor of the query heads is also padding of the key heads, and does no
    // harm; with one key head, the heads of its group may be padded.
    let group = if k.shape[2] == 1 { q.valid[2] } else { q.shape[2] / k.shape[2].max(1) };
    let sizes = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]];
    let mut words: Vec<i64> = sizes.iter().map(|&n| n as i64).collect();
    words.extend([i64::from(attention.causal), i64::from(attention.drops())]);
    words.push((1.0 / (q.shape[3] as f64).sqrt()).to_bits() as i64);
    let whole = |value| op.program.ty(value).shape[1];
    let valid = [whole(value), whole(key), k.valid[1], q.valid[1], group];
    words.extend(valid.map(|n| n as i64));
    words.extend([0, 1, 2].into_iter().flat_map(|dim| part_words(op.part(value, dim))));
    words.extend(part_words(op.part(key, 1)));
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
    let types = [op.float(q.dtype)?, op.float(op.output(0).dtype)?, lanes];
    Ok(KernelSpec::of(Source::Attention, name, &types))
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

/// An attention, or a step of one, on kernels of ours.
struct Own {
    attention: Attention,
    /// Whether results of earlier steps are operands.
    goes_on: bool,
    inputs: Vec<Var>,
    words: Arg,
}

impl Own {
    /// The random key, which is the last operand.
    fn key(&self) -> Arg {
        match self.attention.drops() {
            true => self.inputs.last().map_or(Arg::Null, Var::arg),
            false => Arg::Null,
        }
    }

    /// Results of earlier steps, from this operand on.
    fn before<const N: usize>(&self, first: usize) -> [Arg; N] {
        std::array::from_fn(|i| match self.goes_on {
            true => self.inputs[first + i].arg(),
            false => Arg::Null,
        })
    }

    fn forward(&self, op: &Operation<'_>) -> Result<Tasks, EngineError> {
        let (inputs, outputs) = (&self.inputs, op.outputs());
        let q = &inputs[0];
        let kept = |i: usize| outputs.get(i).map_or(Arg::Null, Var::arg);
        let statistics = match self.attention.kind {
            AttentionKind::Flash => [kept(1), Arg::Null, Arg::Null],
            AttentionKind::Materialised => [Arg::Null, kept(1), kept(2)],
        };
        let mut args = vec![q.arg(), inputs[1].arg(), inputs[2].arg()];
        args.extend(self.before::<2>(3));
        args.extend([self.key(), outputs[0].arg()]);
        args.extend(statistics);
        args.push(self.words.clone());
        let size = q.shape[3];
        let shared = 32 * (size + 1) + 32 * size + WARPS * size;
        let grid = [q.shape[1], q.shape[2], q.shape[0]];
        Ok(vec![launch(op, ("attention", q), grid, shared, args)?])
    }

    fn gradient(&self, op: &Operation<'_>) -> Result<Tasks, EngineError> {
        let (inputs, outputs, words) = (&self.inputs, op.outputs(), &self.words);
        let (q, k, drops) = (&inputs[0], &inputs[1], self.attention.drops());
        let [lse, probabilities, dropped] = match self.attention.kind {
            AttentionKind::Flash => [inputs[4].arg(), Arg::Null, Arg::Null],
            AttentionKind::Materialised => {
                let dropped = drops.then(|| inputs[5].arg());
                [Arg::Null, inputs[4].arg(), dropped.unwrap_or(Arg::Null)]
            }
        };
        // After what the forward kept, of which there is one more here.
        let stored = self.attention.kind == AttentionKind::Materialised && drops;
        let dy = &inputs[5 + usize::from(stored)];
        let delta = Arg::Pointer(op.scratch_at(0)?);
        let rows = q.shape[0] * q.shape[1] * q.shape[2];
        let kernel = KernelSpec::of(Source::Attention, "attention_delta", &[op.float(q.dtype)?]);
        let args = vec![inputs[3].arg(), dy.arg(), delta.clone(), words.clone()];
        let mut tasks = vec![op.over(rows * 32, kernel, args)];
        let operands = || vec![q.arg(), k.arg(), inputs[2].arg(), self.key(), dy.arg()];
        let size = q.shape[3];
        let shared = 2 * 32 * (size + 1) + 2 * WARPS * size;
        let [dq_before, dk_before, dv_before] = self.before::<3>(6);
        let mut args = operands();
        args.extend([lse.clone(), probabilities.clone(), delta.clone(), dq_before]);
        args.extend([outputs[0].arg(), words.clone()]);
        let grid = [q.shape[1], q.shape[2], q.shape[0]];
        tasks.push(launch(op, ("attention_grad_queries", q), grid, shared, args)?);
        let mut args = operands();
        args.extend([lse, probabilities, dropped, delta, dk_before, dv_before]);
        args.extend([outputs[1].arg(), outputs[2].arg(), words.clone()]);
        let grid = [k.shape[1], k.shape[2], q.shape[0]];
        tasks.push(launch(op, ("attention_grad_keys", q), grid, shared, args)?);
        Ok(tasks)
    }
}
