//! Ops whose results depend on where this rank's elements lie in the whole: embeddings and dropout.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Noise, NoiseKind};
use phalanx_ir::random::keep_threshold;
use phalanx_ir::{LocalPart, Op, Order};

use super::var::{MOST_DIMS, extents, padded};
use super::{Arg, KernelTask, Operation, Task, Tasks};
use crate::kernels::{KernelSpec, Source};

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match op.instr.op.clone() {
        Op::Embedding(_) => embedding(op),
        Op::EmbeddingGrad(_) => embedding_grad(op),
        Op::Dropout(d) => dropout(op, d.p, d.site),
        Op::Noise(n) => noise(op, n),
        _ => Err(op.unsupported("it does not depend on positions")),
    }
}

/// Which rows of an embedding's table this rank holds (`Held`).
fn held(op: &Operation<'_>) -> Result<Arg, EngineError> {
    let table = match op.instr.op {
        Op::Embedding(_) => op.instr.inputs[0],
        _ => op.instr.outputs[0],
    };
    let part = op.part(table, 0);
    let first = part.start().ok_or_else(|| op.unsupported("its table is not sharded in blocks"))?;
    let numbers = [op.program.ty(table).shape[0], first, part.len()];
    Ok(Arg::Words(numbers.map(|n| n as i64).to_vec()))
}

fn embedding(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    let (table, ids, out, held) = (op.input(0), op.input(1), op.output(0), held(op)?);
    let kernel = KernelSpec::of(Source::Embedding, "embedding", &[op.float(table.dtype)?]);
    let site = op.engine.site(&op.program.name, "id");
    let args = vec![
        table.arg(),
        ids.arg(),
        out.arg(),
        Arg::Int(ids.elements() as i64),
        Arg::Int(table.width() as i64),
        held,
        Arg::Words(extents(&ids.shape, &ids.valid)),
        Arg::Fault,
        Arg::Int(site),
    ];
    let blocks = [ids.elements().clamp(1, 1 << 20) as u32, 1, 1];
    Ok(vec![Task::Kernel(KernelTask::new(kernel, blocks, 128, args))])
}

/// Rows of the table that a block owns, and its threads, as the kernel has it.
const TABLE_ROWS: usize = 64;
const TABLE_THREADS: u32 = 512;

fn embedding_grad(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    let (ids, dy, out, held) = (op.input(0), op.input(1), op.output(0), held(op)?);
    let types = [op.float(dy.dtype)?, op.float(out.dtype)?];
    let kernel = KernelSpec::of(Source::Embedding, "embedding_grad", &types);
    let site = op.engine.site(&op.program.name, "id");
    let rows = out.shape[0];
    let args = vec![
        ids.arg(),
        dy.arg(),
        out.arg(),
        Arg::Int(ids.elements() as i64),
        Arg::Int(out.width() as i64),
        held,
        Arg::Int(rows as i64),
        Arg::Words(extents(&ids.shape, &ids.valid)),
        Arg::Int(i64::from(ids.valid != ids.shape)),
        Arg::Fault,
        Arg::Int(site),
        out.adds(),
    ];
    let blocks = [rows.div_ceil(TABLE_ROWS).max(1) as u32, 1, 1];
    Ok(vec![Task::Kernel(KernelTask::new(kernel, blocks, TABLE_THREADS, args))])
}

/// A part of a dim, as kernels take it (`Part`).
pub(super) fn part_words(part: LocalPart) -> [i64; 4] {
    let order = match part.order {
        Order::Block => 0,
        Order::Striped => 1,
        Order::Zigzag => 2,
    };
    [order, part.shard as i64, part.shards as i64, part.extent as i64]
}

/// What decides which elements a dropout keeps (`Mask`).
pub(super) fn mask_words(p: f64, site: u32) -> [i64; 3] {
    [i64::from(site), keep_threshold(p) as i64, (1.0 / (1.0 - p)).to_bits() as i64]
}

fn dropout(op: &Operation<'_>, p: f64, site: u32) -> Result<Tasks, EngineError> {
    let (x, key, out, places) = (op.input(0), op.input(1), op.output(0), places(op)?);
    let kernel = KernelSpec::of(Source::Dropout, "dropout", &[op.float(x.dtype)?]);
    let args = vec![
        x.arg(),
        key.arg(),
        out.arg(),
        Arg::Int(x.elements() as i64),
        Arg::Words(mask_words(p, site).to_vec()),
        places,
    ];
    Ok(vec![op.over(x.elements(), kernel, args)])
}

fn noise(op: &Operation<'_>, noise: Noise) -> Result<Tasks, EngineError> {
    let (key, out, places) = (op.input(1), op.output(0), places(op)?);
    let name = match noise.kind {
        NoiseKind::Uniform => "uniform_numbers",
        NoiseKind::Normal => "normal_numbers",
    };
    let kernel = KernelSpec::of(Source::Dropout, name, &[op.float(out.dtype)?]);
    let (count, site) = (Arg::Int(out.elements() as i64), Arg::Int(i64::from(noise.site)));
    Ok(vec![op.over(out.elements(), kernel, vec![key.arg(), out.arg(), count, site, places])])
}

/// Where the elements of the first operand lie in the whole (`Places`).
fn places(op: &Operation<'_>) -> Result<Arg, EngineError> {
    let value = op.instr.inputs[0];
    let (parts, whole) = (op.parts(value), &op.program.ty(value).shape);
    if parts.len() > MOST_DIMS {
        return Err(op.unsupported(format!("more than {MOST_DIMS} dims")));
    }
    let mut places = vec![parts.len() as i64];
    places.extend(padded(whole));
    let blank = LocalPart::whole(1);
    let part = |i: usize| part_words(parts.get(i).copied().unwrap_or(blank));
    places.extend((0..MOST_DIMS).flat_map(part));
    Ok(Arg::Words(places))
}
