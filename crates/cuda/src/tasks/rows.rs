//! Norms, softmax and cross-entropy: a block of threads for each row.
//!
//! Where ranks hold parts of a row, each measures its part, all gather the numbers, and each merges
//! them in the order of the ranks.

use phalanx_call::Requirements;
use phalanx_engine::EngineError;
use phalanx_ir::{Exchange, LocalPart, Op};

use super::collective::gather;
use super::var::extents;
use super::{Arg, KernelTask, Operation, Task, Tasks, Var};
use crate::kernels::{KernelSpec, MOST_SHARED, Source, is_narrow};
use crate::requirements::{CudaRequirements, NORM_WARPS, fits_a_warp, lane_packs, norm_parts};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    let (kind, eps) = kind_of(op)?;
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let (x, value) = (&inputs[0], op.instr.inputs[0]);
    if x.rows() == 0 {
        return Ok(vec![]);
    }
    let part = op.part(value, x.shape.len() - 1);
    let has_classes = matches!(op.instr.op, Op::CrossEntropy(_) | Op::CrossEntropyGrad(_));
    if has_classes && part.start().is_none() {
        return Err(op.unsupported("classes are sharded, but not in blocks"));
    }
    let exchange = Exchange::of(op.program, op.instr);
    let words = described(op, x, &part, exchange.as_ref(), eps);
    let name = op.float(x.dtype)?;
    let operands = Arg::Pointers(operands(&inputs, &outputs));
    let (blocks, threads) = (x.rows().min(1 << 20) as u32, threads(x.width()));
    // Logits of 16 bits whose rows are whole packs have kernels of their own.
    let packed = has_classes && is_narrow(x.dtype) && x.width().is_multiple_of(8);
    let mut tasks = Vec::new();
    let (mut gathered, mut counts) = (Arg::Null, Arg::Null);
    if let Some(exchange) = &exchange {
        let offset = CudaRequirements::default().exchange_offset(op.program, op.instr);
        gathered = Arg::Pointer(op.scratch_at(offset)?);
        counts = valid_counts(op, exchange)?;
        let kernel = match packed {
            true => KernelSpec::of(Source::Loss, "measure_entropy", &[name]),
            false => KernelSpec::of(Source::Rows, "measure", &[name, kind]),
        };
        let args = vec![operands.clone(), Arg::Words(words.clone()), gathered.clone()];
        tasks.push(Task::Kernel(KernelTask::new(kernel, [blocks, 1, 1], threads, args)));
        tasks.push(Task::Transfer(gather(op, exchange, offset)?));
    }
    let words = Arg::Words(words);
    if let Some(whole) = whole_rows(op, kind, &inputs, &outputs, &operands, &words)? {
        return Ok(whole);
    }
    if matches!(op.instr.op, Op::RmsNormGrad(_) | Op::LayerNormGrad(_)) {
        let args = vec![operands, words, gathered, counts];
        tasks.extend(norm_gradient(op, kind, &inputs[0], &outputs[1..], args)?);
        return Ok(tasks);
    }
    let site = op.engine.site(&op.program.name, "target");
    let (kernel, args) = match (&op.instr.op, packed) {
        (Op::CrossEntropyGrad(_), true) => (
            KernelSpec::of(Source::Loss, "finish_entropy_grad", &[name]),
            vec![operands, words, Arg::Fault, Arg::Int(site)],
        ),
        _ => (
            KernelSpec::of(Source::Rows, "finish", &[name, kind]),
            vec![operands, words, gathered, counts, Arg::Fault, Arg::Int(site)],
        ),
    };
    tasks.push(Task::Kernel(KernelTask::new(kernel, [blocks, 1, 1], threads, args)));
    Ok(tasks)
}

/// The kernel's name for what is done with a row, and the norm's epsilon.
fn kind_of(op: &Operation<'_>) -> Result<(&'static str, f64), EngineError> {
    Ok(match &op.instr.op {
        Op::RmsNorm(n) => ("RMS", n.eps),
        Op::LayerNorm(n) => ("LAYER", n.eps),
        Op::Softmax(_) => ("SOFTMAX", 0.0),
        Op::SoftmaxGrad(_) => ("SOFTMAX_GRAD", 0.0),
        Op::CrossEntropy(_) => ("ENTROPY", 0.0),
        Op::CrossEntropyGrad(_) => ("ENTROPY_GRAD", 0.0),
        Op::RmsNormGrad(_) => ("RMS_GRAD", 0.0),
        Op::LayerNormGrad(_) => ("LAYER_GRAD", 0.0),
        _ => return Err(op.unsupported("it does not work on rows")),
    })
}

/// What a kernel must know of rows: their width and where this rank's part of them lies, who has the other parts, and
/// how many rows there are.
fn described(
    op: &Operation<'_>,
    x: &Var,
    part: &LocalPart,
    exchange: Option<&Exchange>,
    eps: f64,
) -> Vec<i64> {
    let (mesh, dims) = (op.program.mesh(), x.shape.len() - 1);
    let total = op.program.ty(op.instr.inputs[0]).shape[dims];
    let mut words = vec![x.width() as i64, x.valid_width() as i64, total as i64];
    words.push(part.start().unwrap_or(0) as i64);
    words.extend(match exchange {
        None => [0, 0, 0],
        Some(e) => {
            [mesh.count(&e.axes) as i64, mesh.shard(op.rank, &e.axes) as i64, e.numbers as i64]
        }
    });
    words.push(eps.to_bits() as i64);
    words.extend(extents(&x.shape[..dims], &x.valid[..dims]));
    words.push(x.rows() as i64);
    words
}

/// The tasks of a norm or its gradient over whole rows without padding, several elements at a time;
/// nothing for other ops and rows.
fn whole_rows(
    op: &Operation<'_>,
    kind: &'static str,
    inputs: &[Var],
    outputs: &[Var],
    operands: &Arg,
    words: &Arg,
) -> Result<Option<Tasks>, EngineError> {
    let x = &inputs[0];
    let is_gradient = match kind {
        "RMS" | "LAYER" => false,
        "RMS_GRAD" | "LAYER_GRAD" => true,
        _ => return Ok(None),
    };
    let wide = 16 / x.dtype.size();
    let packs = x.width().div_ceil(32 * wide);
    let whole = x.valid == x.shape && op.part(op.instr.inputs[0], x.shape.len() - 1).shards == 1;
    // What a lane keeps of a row must fit its registers; a block takes a row of a gradient with whole
    // warps. Slots are aligned, so rows are if their width is.
    let fits = match is_gradient {
        false => x.width().is_multiple_of(wide) && packs * wide <= 128,
        true => lane_packs(x.width(), x.dtype).is_some_and(|packs| packs <= 32),
    };
    if !whole || !fits {
        return Ok(None);
    }
    let mut args = vec![operands.clone(), words.clone()];
    if !is_gradient {
        let types = [op.float(x.dtype)?, kind, &packs.to_string()];
        let kernel = KernelSpec::of(Source::Norms, "norm_rows", &types);
        let blocks = [x.rows().div_ceil(NORM_WARPS).min(1 << 20) as u32, 1, 1];
        let task = KernelTask::new(kernel, blocks, 32 * NORM_WARPS as u32, args);
        return Ok(Some(vec![Task::Kernel(task)]));
    }
    args.extend([past(op), outputs[0].adds(), Arg::Pointer(op.scratch_at(0)?)]);
    let (name, warps) = match fits_a_warp(packs) {
        true => ("norm_narrow_grad", NORM_WARPS),
        false => ("norm_rows_grad", packs),
    };
    let types = [op.float(x.dtype)?, kind, &packs.to_string()];
    let kernel = KernelSpec::of(Source::Norms, name, &types);
    let blocks = [norm_parts(x.rows(), x.width(), x.dtype) as u32, 1, 1];
    let first = KernelTask::new(kernel, blocks, 32 * warps as u32, args);
    Ok(Some(vec![Task::Kernel(first), summed_parts(op, x, &outputs[1..])?]))
}

/// dx, with the sums of each part of the rows; then the sum of the parts for each vector.
fn norm_gradient(
    op: &Operation<'_>,
    kind: &'static str,
    x: &Var,
    vectors: &[Var],
    mut args: Vec<Arg>,
) -> Result<Tasks, EngineError> {
    let acc = x.dtype.accumulator();
    let parts = norm_parts(x.rows(), x.width(), x.dtype);
    let shared = vectors.len() * x.width() * acc.size();
    if shared > MOST_SHARED as usize {
        return Err(op.unsupported(format!("rows of {} elements are too wide", x.width())));
    }
    args.extend([past(op), op.output(0).adds(), Arg::Pointer(op.scratch_at(0)?)]);
    let kernel = KernelSpec::of(Source::Rows, "finish_norm_grad", &[op.float(x.dtype)?, kind]);
    let blocks = [parts as u32, 1, 1];
    let first = KernelTask::new(kernel, blocks, threads(x.width()), args).sharing(shared);
    Ok(vec![Task::Kernel(first), summed_parts(op, x, vectors)?])
}

/// What is added to the gradient of a norm's operand.
fn past(op: &Operation<'_>) -> Arg {
    let addend = op.folds.to(op.instr.outputs[0]).and_then(|fold| fold.addend);
    addend.map_or(Arg::Null, |value| op.var(value).arg())
}

/// The sums of the parts in the scratch memory, for each of one or two vectors.
fn summed_parts(op: &Operation<'_>, x: &Var, vectors: &[Var]) -> Result<Task, EngineError> {
    let (first, second) = (&vectors[0], vectors.get(1));
    let types = [op.float(x.dtype.accumulator())?, op.float(first.dtype)?];
    let kernel = KernelSpec::of(Source::Rows, "sum_parts", &types);
    let mut args = vec![Arg::Pointer(op.scratch_at(0)?), first.arg()];
    args.push(second.map_or(Arg::Null, Var::arg));
    let numbers = [norm_parts(x.rows(), x.width(), x.dtype), first.width(), first.valid_width()];
    args.extend(numbers.map(|n| Arg::Int(n as i64)));
    args.extend([first.adds(), second.map_or(Arg::Int(0), Var::adds)]);
    // A block has 32 columns and its warps take parts in turn, as the kernel has it.
    let blocks = [first.width().div_ceil(32).max(1) as u32, vectors.len() as u32, 1];
    Ok(Task::Kernel(KernelTask::new(kernel, blocks, 1024, args)))
}

/// For each part of a row: how many valid elements it has.
fn valid_counts(op: &mut Operation<'_>, exchange: &Exchange) -> Result<Arg, EngineError> {
    let (mesh, ty) = (op.program.mesh(), op.program.ty(op.instr.inputs[0]));
    let last = |rank: usize| ty.local_valid(mesh, rank).last().copied().unwrap_or(1) as i64;
    let counts = mesh.group(op.rank, &exchange.axes).into_iter().map(last);
    let bytes: Vec<u8> = counts.flat_map(i64::to_ne_bytes).collect();
    op.engine.constant(&bytes)
}

/// Five operands and three results, with nulls for those that an op does not have.
fn operands(inputs: &[Var], outputs: &[Var]) -> Vec<Option<super::Place>> {
    let places = |vars: &[Var], n: usize| -> Vec<Option<super::Place>> {
        (0..n).map(|i| vars.get(i).map(Var::place)).collect()
    };
    [places(inputs, 5), places(outputs, 3)].concat()
}

/// Threads of a block that works on rows of this width: whole warps.
pub(super) fn threads(width: usize) -> u32 {
    (width.div_ceil(4).next_multiple_of(32)).clamp(32, 512) as u32
}
