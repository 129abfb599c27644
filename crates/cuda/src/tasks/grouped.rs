//! Products of packed rows with the matrices of their experts: of 16 bits on tensor cores.

use phalanx_engine::EngineError;
use phalanx_ir::{DType, Op};

use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source, is_narrow};

/// Rows and columns of a result that a block of threads computes (`GROUPED_TILE`).
const TILE: usize = 16;

/// The same on tensor cores, the threads of such a block, and bytes of its shared memory (`tensor.cu`).
const SIDE: usize = 128;
const TENSOR_THREADS: u32 = 128;
const TENSOR_SHARED: usize = 4 * SIDE * SIDE;

/// The most dims of regions (`Grouped`).
const DIMS: usize = 6;

/// The most blocks in the second direction of a launch.
const MOST: usize = 1 << 15;

pub(super) fn compile(op: &mut Operation<'_>) -> Result<Tasks, EngineError> {
    match op.instr.op.clone() {
        Op::GroupedMatmul(of) => product(op, of.transposed),
        Op::GroupedMatmulGrad(_) => gradient(op),
        _ => Err(op.unsupported("it is not a product of packed rows")),
    }
}

/// How rows lie here (`Grouped`), and how many regions there are.
fn grouped(
    op: &Operation<'_>,
    x: &Var,
    counts: &Var,
    experts: usize,
) -> Result<(Arg, usize), EngineError> {
    let dims = x.shape.len() - 2;
    if dims > DIMS {
        return Err(op.unsupported(format!("regions have {dims} dims, at most {DIMS}")));
    }
    let (regions, parts) = (x.shape[..dims].iter().product::<usize>(), x.shape[0].max(1));
    let mut words = vec![regions, regions / parts, x.shape[dims], counts.width()];
    words.extend([counts.valid_width(), experts / parts, dims]);
    for sizes in [&x.shape, &x.valid] {
        words.extend((0..DIMS).map(|dim| if dim < dims { sizes[dim] } else { 1 }));
    }
    Ok((Arg::Words(words.into_iter().map(|n| n as i64).collect()), regions))
}

/// A block for each tile of this many tiles, in each of the others.
fn launch(kernel: KernelSpec, tiles: usize, others: usize, args: Vec<Arg>) -> KernelTask {
    let blocks = [tiles.max(1) as u32, others.clamp(1, MOST) as u32, 1];
    KernelTask::new(kernel, blocks, THREADS, args)
}

/// The same on tensor cores.
fn launch_tensor(kernel: KernelSpec, tiles: usize, others: usize, args: Vec<Arg>) -> KernelTask {
    let blocks = [tiles.max(1) as u32, others.clamp(1, MOST) as u32, 1];
    KernelTask::new(kernel, blocks, TENSOR_THREADS, args).sharing(TENSOR_SHARED)
}

fn int(n: usize) -> Arg {
    Arg::Int(n as i64)
}

fn product(op: &Operation<'_>, transposed: bool) -> Result<Tasks, EngineError> {
    let (x, w, counts, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let (of, regions) = grouped(op, &x, &counts, w.shape[0])?;
    let room = x.shape[x.shape.len() - 2];
    let arguments = [op.float(x.dtype)?, if transposed { "true" } else { "false" }];
    let mut args = vec![x.arg(), w.arg(), counts.arg(), out.arg(), of];
    args.extend([x.width(), x.valid_width(), w.shape[1], w.shape[2]].map(int));
    let task = if is_narrow(x.dtype) {
        // Each run may end within a tile, and so may the rows that are nobody's.
        let tiles = (room.div_ceil(SIDE) + counts.valid_width()) * out.width().div_ceil(SIDE);
        let kernel = KernelSpec::of(Source::GroupedTensor, "tensor_rows", &arguments);
        launch_tensor(kernel, tiles, regions, args)
    } else {
        let tiles = room.div_ceil(TILE) * out.width().div_ceil(TILE);
        launch(KernelSpec::of(Source::Grouped, "grouped_rows", &arguments), tiles, regions, args)
    };
    Ok(vec![Task::Kernel(task)])
}

fn gradient(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, y, counts, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let (of, _) = grouped(op, &x, &counts, out.shape[0])?;
    let types = [op.float(x.dtype)?, op.float(out.dtype)?];
    let (experts, rows, cols) = (out.shape[0], out.shape[1], out.shape[2]);
    let args =
        vec![x.arg(), y.arg(), counts.arg(), out.arg(), of, int(rows), int(cols), out.adds()];
    let tiles = |side| rows.div_ceil(side) * cols.div_ceil(side);
    let task = if is_narrow(x.dtype) && out.dtype != DType::F64 {
        let kernel = KernelSpec::of(Source::GroupedTensor, "tensor_matrices", &types);
        launch_tensor(kernel, tiles(SIDE), experts, args)
    } else {
        let kernel = KernelSpec::of(Source::Grouped, "grouped_matrices", &types);
        launch(kernel, tiles(TILE), experts, args)
    };
    Ok(vec![Task::Kernel(task)])
}
