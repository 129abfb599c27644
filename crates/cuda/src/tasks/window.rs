//! Convolution, pooling and their gradients.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{PoolKind, Window};
use phalanx_ir::{Op, ValueId};

use super::halo;
use super::{Arg, KernelTask, Operation, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    let (mut tasks, operands) = halo::compile(op)?;
    tasks.push(over_windows(op, &operands)?);
    Ok(tasks)
}

/// The kernel over operands that have what windows read of neighbours.
fn over_windows(op: &Operation<'_>, operands: &[Var]) -> Result<Task, EngineError> {
    let (a, out) = (&operands[0], op.output(0));
    let [x, y] = [op.instr.inputs[0], op.instr.outputs[0]];
    let float = op.float(a.dtype)?;
    let spec = |name: &str, flag: bool| {
        KernelSpec::of(Source::Window, name, &[float, if flag { "true" } else { "false" }])
    };
    let over = |kernel, args| Ok(op.over(out.elements(), kernel, args));
    match &op.instr.op {
        Op::Conv2d(conv) => {
            let words = words(op, &conv.window, [x, y], &out, a, &operands[1].shape)?;
            let args = vec![a.arg(), operands[1].arg(), out.arg(), words];
            over(spec("convolution", false), args)
        }
        Op::Conv2dInputGrad(conv) => {
            let words = words(op, &conv.window, [y, x], &out, a, &operands[1].shape)?;
            let args = vec![a.arg(), operands[1].arg(), out.arg(), words];
            over(spec("convolution", true), args)
        }
        Op::Conv2dWeightGrad(conv) => {
            let dy = &operands[1];
            let words = words(op, &conv.window, [x, op.instr.inputs[1]], dy, a, &out.shape)?;
            let types = [float, op.float(out.dtype)?];
            let kernel = KernelSpec::of(Source::Window, "convolution_weights", &types);
            let args = vec![a.arg(), dy.arg(), out.arg(), words, out.adds()];
            let blocks = [out.rows().clamp(1, 1 << 20) as u32, 1, 1];
            Ok(Task::Kernel(KernelTask::new(kernel, blocks, 128, args)))
        }
        Op::Pooling(pool) => {
            let words = words(op, &pool.window, [x, y], &out, a, &pool.window.size)?;
            let max = pool.kind == PoolKind::Max;
            let taken = if max { op.output(1).arg() } else { Arg::Null };
            over(spec("pool", max), vec![a.arg(), out.arg(), taken, words])
        }
        Op::PoolingGrad(pool) => {
            let words = words(op, &pool.of.window, [y, x], &out, a, &pool.of.window.size)?;
            let max = pool.of.kind == PoolKind::Max;
            let taken = if max { operands[1].arg() } else { Arg::Null };
            over(spec("pool_grad", max), vec![a.arg(), taken, out.arg(), words])
        }
        _ => Err(op.unsupported("it has no window")),
    }
}

/// What kernels take (`Windows`): the result that threads go through, what they gather, and how.
fn words(
    op: &Operation<'_>,
    window: &Window,
    [images, outputs]: [ValueId; 2],
    result: &Var,
    from: &Var,
    taps: &[usize],
) -> Result<Arg, EngineError> {
    let (program, mesh) = (op.program, op.program.mesh());
    let (images, outputs) = (program.ty(images), program.ty(outputs));
    let backwards = matches!(op.instr.op, Op::Conv2dInputGrad(_) | Op::PoolingGrad(_));
    let spans = window.spans(images, outputs, (mesh, op.rank), backwards);
    let spans = spans.ok_or_else(|| op.unsupported("height or width is not sharded in blocks"))?;
    let mut words = [result.shape.as_slice(), &result.valid, &from.shape[1..]].concat();
    words.extend([from.valid[3], taps[0], taps[1]]);
    for span in spans {
        words.extend([span.size, span.stride, span.dilation, span.shift]);
        words.extend([span.inputs, span.outputs].concat());
    }
    Ok(Arg::Words(words.into_iter().map(|n| n as i64).collect()))
}
