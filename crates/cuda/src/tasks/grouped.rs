//! Products of packed rows with the matrices of their experts.

use phalanx_engine::EngineError;
use phalanx_ir::Op;

use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks, Var};
use crate::kernels::{KernelSpec, Source};

/// Rows and columns of a result that a block of threads computes (`GROUPED_TILE`).
const TILE: usize = 16;

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

fn launch(kernel: KernelSpec, [rows, cols]: [usize; 2], others: usize, args: Vec<Arg>) -> Task {
    let tiles = rows.div_ceil(TILE) * cols.div_ceil(TILE);
    let blocks = [tiles.max(1) as u32, others.clamp(1, MOST) as u32, 1];
    Task::Kernel(KernelTask::new(kernel, blocks, THREADS, args))
}

fn int(n: usize) -> Arg {
    Arg::Int(n as i64)
}

fn product(op: &Operation<'_>, transposed: bool) -> Result<Tasks, EngineError> {
    let (x, w, counts, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let (of, regions) = grouped(op, &x, &counts, w.shape[0])?;
    let flag = if transposed { "true" } else { "false" };
    let kernel = KernelSpec::of(Source::Grouped, "grouped_rows", &[op.float(x.dtype)?, flag]);
    let mut args = vec![x.arg(), w.arg(), counts.arg(), out.arg(), of];
    args.extend([x.width(), x.valid_width(), w.shape[1], w.shape[2]].map(int));
    Ok(vec![launch(kernel, [x.shape[x.shape.len() - 2], out.width()], regions, args)])
}

fn gradient(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, y, counts, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let (of, _) = grouped(op, &x, &counts, out.shape[0])?;
    let types = [op.float(x.dtype)?, op.float(out.dtype)?];
    let kernel = KernelSpec::of(Source::Grouped, "grouped_matrices", &types);
    let (rows, cols) = (out.shape[1], out.shape[2]);
    let args =
        vec![x.arg(), y.arg(), counts.arg(), out.arg(), of, int(rows), int(cols), out.adds()];
    Ok(vec![launch(kernel, [rows, cols], out.shape[0], args)])
}
