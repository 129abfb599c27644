//! Ops that move elements without computing.

use phalanx_engine::EngineError;
use phalanx_ir::{DType, Op};

use super::var::{MOST_DIMS, extents, padded};
use super::{Arg, Operation, Place, Resources, Task, Tasks, Var, over};
use crate::kernels::{KernelSpec, Source, type_name};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (inputs, out) = (op.inputs(), op.output(0));
    if out.shape.len() > MOST_DIMS {
        return Err(op.unsupported(format!("more than {MOST_DIMS} dims")));
    }
    match &op.instr.op {
        Op::Fill(fill) => Ok(vec![filled(op, &out, fill.value)?]),
        Op::Transpose(t) => {
            let strides = inputs[0].strides();
            let from: Vec<usize> = t.perm.iter().map(|&dim| strides[dim]).collect();
            Ok(vec![walked(op, [&inputs[0], &out], &out.shape, [0, 0], [&from, &out.strides()])])
        }
        Op::Broadcast(b) => {
            let from = repeated(&out.shape, &b.dims);
            Ok(vec![walked(op, [&inputs[0], &out], &out.shape, [0, 0], [&from, &out.strides()])])
        }
        Op::Slice(s) => Ok(sliced(op, &inputs[0], &out, s.dim, s.start)),
        Op::Pad(p) => Ok(joined(op, &inputs, &out, p.dim, p.before)),
        Op::Concat(c) => Ok(joined(op, &inputs, &out, c.dim, 0)),
        Op::ZeroPadding(_) => {
            let kernel = KernelSpec::of(Source::Movement, "zero_padding", &[op.float(out.dtype)?]);
            let x = &inputs[0];
            let count = Arg::Int(out.elements() as i64);
            let words = Arg::Words(extents(&x.shape, &x.valid));
            let args = vec![x.arg(), out.arg(), words, count, out.adds()];
            Ok(vec![op.over(out.elements(), kernel, args)])
        }
        _ => Err(op.unsupported("it does not move elements")),
    }
}

/// A copy of a value into another output, or its addition to what is there.
pub(crate) fn copy(engine: &dyn Resources, from: &Var, to: &Var) -> Task {
    if !to.dtype.is_float() {
        return Task::Copy { from: from.place(), to: to.place(), bytes: to.bytes() };
    }
    // Adding to padding does no harm: it may hold anything.
    let kernel = KernelSpec::of(Source::Movement, "copy_or_add", &[type_name(to.dtype)]);
    let count = Arg::Int(to.elements() as i64);
    over(engine, to.elements(), kernel, vec![from.arg(), to.arg(), count, to.adds()])
}

/// A value of equal elements.
pub(super) fn filled(op: &Operation<'_>, out: &Var, value: f64) -> Result<Task, EngineError> {
    let count = out.elements();
    let (kernel, value) = match out.dtype {
        DType::I32 => {
            (KernelSpec::of(Source::Movement, "fill_word", &["int"]), Arg::Int(value as i32 as i64))
        }
        DType::Bool => {
            let word = Arg::Int(i64::from(value != 0.0));
            (KernelSpec::of(Source::Movement, "fill_word", &["u8"]), word)
        }
        dtype => {
            let name = op.float(dtype)?;
            (KernelSpec::of(Source::Movement, "fill", &[name]), Arg::Real(value))
        }
    };
    Ok(op.over(count, kernel, vec![out.arg(), Arg::Int(count as i64), value]))
}

/// A part of a dim; what is padding in the result is zero.
pub(super) fn sliced(op: &Operation<'_>, x: &Var, out: &Var, dim: usize, start: usize) -> Tasks {
    let mut shape = out.shape.clone();
    let mut tasks = Vec::new();
    if out.valid[dim] < shape[dim] {
        shape[dim] = out.valid[dim];
        tasks.push(Task::Clear { to: out.place(), bytes: out.bytes() });
    }
    let (from, to) = (x.strides(), out.strides());
    let first = [start * from[dim], 0];
    tasks.push(walked(op, [x, out], &shape, first, [&from, &to]));
    tasks
}

/// A part of a dim of the result, which stays as it is elsewhere.
pub(super) fn put(op: &Operation<'_>, x: &Var, out: &Var, dim: usize, start: usize) -> Task {
    let (from, to) = (x.strides(), out.strides());
    walked(op, [x, out], &x.shape, [0, start * to[dim]], [&from, &to])
}

/// Some places of a dim, in the order of the list.
pub(super) fn picked(
    op: &mut Operation<'_>,
    x: &Var,
    out: &Var,
    dim: usize,
    places: &[usize],
) -> Result<Task, EngineError> {
    let bytes: Vec<u8> = places.iter().flat_map(|&at| (at as i64).to_ne_bytes()).collect();
    let list = op.engine.constant(&bytes)?;
    let inner: usize = out.shape[dim + 1..].iter().product();
    let kernel = KernelSpec::of(Source::Movement, "pick", &[bits_of(out.dtype)]);
    let mut args = vec![x.arg(), out.arg(), list];
    args.extend([out.shape[dim], x.shape[dim], inner, out.elements()].map(|n| Arg::Int(n as i64)));
    Ok(op.over(out.elements(), kernel, args))
}

/// Parts one after the other along a dim, from index `first`; zeros elsewhere. Only the valid elements
/// of a part count.
fn joined(op: &Operation<'_>, inputs: &[Var], out: &Var, dim: usize, first: usize) -> Tasks {
    let covered: usize = inputs.iter().map(|var| var.valid[dim]).sum();
    let mut tasks = Vec::new();
    if covered < out.shape[dim] {
        tasks.push(Task::Clear { to: out.place(), bytes: out.bytes() });
    }
    let (mut at, to) = (first, out.strides());
    for var in inputs {
        let mut shape = var.shape.clone();
        shape[dim] = var.valid[dim];
        tasks.push(walked(op, [var, out], &shape, [0, at * to[dim]], [&var.strides(), &to]));
        at += var.valid[dim];
    }
    tasks
}

/// A copy over a shape, with strides and first elements in the operand and the result.
pub(super) fn walked(
    op: &Operation<'_>,
    [x, out]: [&Var; 2],
    shape: &[usize],
    first: [usize; 2],
    [from, to]: [&[usize]; 2],
) -> Task {
    let (size, count) = (out.dtype.size(), shape.iter().product::<usize>());
    let place = |var: &Var, at: usize| -> Place { var.place().add(at * size) };
    let name = bits_of(out.dtype);
    let mut words = vec![shape.len() as i64, count as i64];
    for numbers in [shape, from, to] {
        words.extend(padded(numbers));
    }
    let args = vec![
        Arg::Pointer(place(x, first[0])),
        Arg::Pointer(place(out, first[1])),
        Arg::Words(words),
    ];
    op.over(count, KernelSpec::of(Source::Movement, "copy_strided", &[name]), args)
}

/// The name in kernels of words as large as a type's elements.
const fn bits_of(dtype: DType) -> &'static str {
    match dtype.size() {
        8 => "u64",
        4 => "u32",
        2 => "u16",
        _ => "u8",
    }
}

/// The stride of each dim of a repetition in its operand: none where it is repeated.
fn repeated(shape: &[usize], dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for dim in (0..shape.len()).rev().filter(|d| !dims.contains(d)) {
        strides[dim] = stride;
        stride *= shape[dim];
    }
    strides
}
