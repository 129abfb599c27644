//! Rows and columns of the matrices of a packed unit: means of squares, and a division by both.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Factors, RowRun};

use super::update::constant;
use super::{Arg, KernelTask, Operation, THREADS, Task, Tasks};
use crate::kernels::{KernelSpec, Source};

/// Columns of a block, and threads: a warp for every so many rows.
const TOGETHER: usize = 32;
const COLUMN_THREADS: u32 = 1024;

pub(super) fn means(op: &mut Operation<'_>, factors: &Factors) -> Result<Tasks, EngineError> {
    let (x, rows, columns) = (op.input(0), op.output(0), op.output(1));
    let mut runs = factors.runs(op.first_element(op.instr.inputs[0])?, x.valid[0]);
    runs.sort_by_key(|run| run.row);
    let within = |from: usize, to: usize| {
        [from, to].map(|row| runs.partition_point(|run| run.row < row) as i64)
    };
    let (mut of_rows, mut of_columns) = (Vec::new(), Vec::new());
    for matrix in factors.matrices() {
        let [height, width] = [&matrix.rows, &matrix.columns].map(|own| own.len() as i64);
        for row in matrix.rows.clone() {
            of_rows.extend(within(row, row + 1));
            of_rows.push(width);
        }
        for first in matrix.columns.clone().step_by(TOGETHER) {
            let end = matrix.columns.end.min(first + TOGETHER);
            of_columns.extend([first as i64, end as i64]);
            of_columns.extend(within(matrix.rows.start, matrix.rows.end));
            of_columns.push(height);
        }
    }
    // Padding of the results is zero.
    let totals = factors.totals();
    of_rows.extend((totals[0]..rows.elements()).flat_map(|_| [0, 0, 1]));
    let padding = (totals[1]..columns.elements()).map(|column| column as i64);
    of_columns.extend(padding.flat_map(|column| [column, column + 1, 0, 0, 1]));
    let list: Vec<i64> = runs.iter().flat_map(words).collect();
    let runs = constant(op, &list)?;
    let types = [op.float(x.dtype)?];
    let mut tasks = Vec::new();
    for (name, out, list, words, threads) in [
        ("factor_rows", rows, of_rows, 3, THREADS),
        ("factor_columns", columns, of_columns, 5, COLUMN_THREADS),
    ] {
        let blocks = [(list.len() / words) as u32, 1, 1];
        let args = vec![x.arg(), out.arg(), runs.clone(), constant(op, &list)?];
        let kernel = KernelSpec::of(Source::Update, name, &types);
        tasks.push(Task::Kernel(KernelTask::new(kernel, blocks, threads, args)));
    }
    Ok(tasks)
}

pub(super) fn direction(op: &mut Operation<'_>, factors: &Factors) -> Result<Tasks, EngineError> {
    let (inputs, out) = (op.inputs(), op.output(0));
    let x = &inputs[0];
    let runs = factors.runs(op.first_element(op.instr.inputs[0])?, x.valid[0]);
    // What lies between rows is zero, and so is padding.
    let (mut list, mut at) = (Vec::new(), 0);
    let gap = |from: usize, to: usize| [from as i64, to as i64, -1, 0];
    for run in &runs {
        list.extend(
            (at < run.elements.start).then(|| gap(at, run.elements.start)).into_iter().flatten(),
        );
        list.extend(words(run));
        at = run.elements.end;
    }
    list.extend((at < x.elements()).then(|| gap(at, x.elements())).into_iter().flatten());
    let count = list.len() / 4;
    if count == 0 {
        return Ok(vec![]);
    }
    let kernel = KernelSpec::of(Source::Update, "factor_direction", &[op.float(x.dtype)?]);
    let mut args: Vec<Arg> = inputs[..4].iter().map(|var| var.arg()).collect();
    args.push(inputs.get(4).map_or(Arg::Null, |var| var.arg()));
    args.extend([out.arg(), constant(op, &list)?, Arg::Int(count as i64)]);
    let blocks = [(count as u32).min(4 * op.engine.blocks()).max(1), 1, 1];
    Ok(vec![Task::Kernel(KernelTask::new(kernel, blocks, THREADS, args))])
}

fn words(run: &RowRun) -> [i64; 4] {
    [run.elements.start, run.elements.end, run.row, run.column].map(|word| word as i64)
}
