//! Elementwise ops, alone or in groups: one generated kernel.

use phalanx_engine::EngineError;
use phalanx_ir::ops::FusedStep;

use super::reduce::finish;
use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks, Var};
use crate::folds::{Remaining, steps_of};
use crate::generate::{Group, Repeat};
use crate::requirements::reduce_parts;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let steps = steps_of(op.program, op.instr).ok_or_else(|| op.unsupported("it has no steps"))?;
    // What an instruction before has computed is an operand now.
    let Remaining { steps, results } = op.folds.remaining(op.instr, steps);
    let outputs: Vec<&Var> = results.iter().map(|(result, _)| &outputs[*result]).collect();
    if results.is_empty() || outputs[0].elements() == 0 {
        return Ok(vec![]);
    }
    let results: Vec<usize> = results.into_iter().map(|(_, step)| step).collect();
    let adds = outputs.iter().map(|var| var.adds()).collect();
    if let Some((0, sum)) = op.folds.sum_of(op.instr) {
        return summed(op, &inputs, &steps, outputs[0], &op.var(sum));
    }
    Ok(vec![group(op, &inputs.iter().collect::<Vec<_>>(), &steps, &results, (&outputs, adds))?])
}

/// A kernel of these steps over all elements, with its results and whether they are added to.
pub(super) fn group(
    op: &Operation<'_>,
    inputs: &[&Var],
    steps: &[FusedStep],
    results: &[usize],
    (outputs, adds): (&[&Var], Vec<Arg>),
) -> Result<Task, EngineError> {
    let full = outputs[0].elements();
    let repeat = |var: &Var| match var.elements() {
        n if n == full => Repeat::Full,
        1 => Repeat::Single,
        _ => Repeat::Periodic,
    };
    let given: Vec<_> = inputs.iter().map(|var| (var.dtype, repeat(var))).collect();
    let group = Group { inputs: &given, steps, results };
    let kernel = group.kernel().map_err(|why| op.unsupported(why))?;
    let mut args = Vec::new();
    for (var, (_, repeat)) in inputs.iter().zip(&given) {
        args.push(var.arg());
        if *repeat == Repeat::Periodic {
            args.push(Arg::Int(var.elements() as i64));
        }
    }
    for (var, adds) in outputs.iter().zip(adds) {
        args.extend([var.arg(), adds]);
    }
    args.push(Arg::Int(full as i64));
    if args.len() > 32 {
        return Err(op.unsupported(format!("a group of {} operands is too large", inputs.len())));
    }
    // Each thread takes one pack of neighbours: the next blocks begin wherever others have ended, so no processor waits
    // for those that have more to do.
    let blocks = full.div_ceil(group.wide() * THREADS as usize).clamp(1, 1 << 24) as u32;
    Ok(Task::Kernel(KernelTask::new(kernel, [blocks, 1, 1], THREADS, args)))
}

/// A kernel of these steps that also sums the columns of its one result, and the sum of its parts.
fn summed(
    op: &Operation<'_>,
    inputs: &[Var],
    steps: &[FusedStep],
    out: &Var,
    sum: &Var,
) -> Result<Tasks, EngineError> {
    let columns = sum.elements();
    let rows = out.elements() / columns.max(1);
    let parts = reduce_parts(columns, rows);
    let given: Vec<_> = inputs.iter().map(|var| (var.dtype, Repeat::Full)).collect();
    let group = Group { inputs: &given, steps, results: &[0] };
    let kernel = group.kernel_with_sum().map_err(|why| op.unsupported(why))?;
    let mut args: Vec<Arg> = inputs.iter().map(Var::arg).collect();
    args.extend([out.arg(), Arg::Pointer(op.scratch_at(0)?)]);
    args.extend([rows, columns, parts].map(|n| Arg::Int(n as i64)));
    let blocks = [columns.div_ceil(256) as u32, parts as u32, 1];
    let first = Task::Kernel(KernelTask::new(kernel, blocks, THREADS, args));
    Ok(vec![first, finish(op, sum, "TOTAL", parts)?])
}
