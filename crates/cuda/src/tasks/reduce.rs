//! Sums and maxima.

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::ReduceKind;

use super::var::{MOST_DIMS, padded};
use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source};
use crate::requirements::reduce_parts;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    if op.folds.is_summed(op.instr.outputs[0]) {
        return Ok(vec![]);
    }
    if x.shape.len() > MOST_DIMS {
        return Err(op.unsupported(format!("more than {MOST_DIMS} dims")));
    }
    let (kind, dims) = match &op.instr.op {
        Op::SumSquares(_) => ("SQUARES", (0..x.shape.len()).collect()),
        Op::Reduce(r) if r.kind == ReduceKind::Max => ("LARGEST", r.dims.clone()),
        Op::Reduce(r) => ("TOTAL", r.dims.clone()),
        _ => return Err(op.unsupported("it is not a reduction")),
    };
    let strides = x.strides();
    let walk = |gone: bool| -> [Vec<usize>; 2] {
        // Only valid elements are reduced.
        let sizes = if gone { &x.valid } else { &x.shape };
        let own = || (0..x.shape.len()).filter(|d| dims.contains(d) == gone);
        [own().map(|d| sizes[d]).collect(), own().map(|d| strides[d]).collect()]
    };
    let ([kept, kept_strides], [reduced, reduced_strides]) = (walk(false), walk(true));
    let (results, elements) = (out.elements(), reduced.iter().product::<usize>());
    if results == 0 {
        return Ok(vec![]);
    }
    // As many as were planned, which counts padding too.
    let parts = reduce_parts(results, x.elements() / results);
    let mut words = vec![kept.len() as i64, reduced.len() as i64, results as i64, elements as i64];
    for numbers in [&kept, &kept_strides, &reduced, &reduced_strides] {
        words.extend(padded(numbers));
    }
    let partial = Arg::Pointer(op.scratch_at(0)?);
    let count = Arg::Int(parts as i64);
    let wide = 16 / x.dtype.size();
    // Leading dims of a value without padding: rows of as many columns as there are results.
    let leading = dims.iter().enumerate().all(|(i, &dim)| i == dim) && x.valid == x.shape;
    // One result of elements that lie one after the other.
    let flat = results == 1 && (x.valid == x.shape || x.shape.len() == 1);
    let first = if flat {
        let types = [op.float(x.dtype)?, kind, &wide.to_string()];
        let kernel = KernelSpec::of(Source::Reduce, "reduce_flat", &types);
        let args = vec![x.arg(), partial.clone(), Arg::Int(elements as i64)];
        Task::Kernel(KernelTask::new(kernel, [parts as u32, 1, 1], THREADS, args))
    } else if leading && results.is_multiple_of(wide) {
        let types = [op.float(x.dtype)?, kind, &wide.to_string()];
        let kernel = KernelSpec::of(Source::Reduce, "reduce_columns", &types);
        let sides = [elements, results].map(|n| Arg::Int(n as i64));
        let args = [vec![x.arg(), partial.clone()], sides.to_vec(), vec![count.clone()]].concat();
        let blocks = [results.div_ceil(32 * wide) as u32, parts as u32, 1];
        Task::Kernel(KernelTask::new(kernel, blocks, THREADS, args))
    } else {
        let kernel = KernelSpec::of(Source::Reduce, "reduce_parts", &[op.float(x.dtype)?, kind]);
        let args = vec![x.arg(), partial.clone(), Arg::Words(words), count.clone()];
        op.over(results * parts, kernel, args)
    };
    Ok(vec![first, finish(op, &out, kind, parts)?])
}

/// The results from the parts in the scratch memory.
pub(super) fn finish(
    op: &Operation<'_>,
    out: &Var,
    kind: &str,
    parts: usize,
) -> Result<Task, EngineError> {
    let results = out.elements();
    let kernel = KernelSpec::of(Source::Reduce, "reduce_finish", &[op.float(out.dtype)?, kind]);
    // As the kernel has it: a block for each of a few results, or for 32 of many.
    let blocks = match results {
        0..=32 => results,
        _ => results.div_ceil(32),
    };
    let numbers = [results, parts].map(|n| Arg::Int(n as i64));
    let mut args = vec![Arg::Pointer(op.scratch_at(0)?), out.arg()];
    args.extend(numbers.into_iter().chain([out.adds()]));
    Ok(Task::Kernel(KernelTask::new(kernel, [blocks as u32, 1, 1], THREADS, args)))
}
