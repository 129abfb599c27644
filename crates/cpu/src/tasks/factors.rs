//! Rows and columns of the matrices of a packed unit: a mean of squares for each, or a division by both.
//!
//! Which rows lie in the part of a unit that a rank holds is found once, at compile time.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Factors, RowRun};

use super::extent::{common, gaps};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::factors::{add_squares, divide};
use crate::kernels::reduce::sum_of_squares;

/// Columns that are summed together, in memory of a worker's own.
const TOGETHER: usize = 64;

pub(super) fn means(op: &Operation<'_>, factors: &Factors) -> Result<Tasks, EngineError> {
    let (x, rows, columns) = (op.input(0), op.output(0), op.output(1));
    let mut runs = factors.runs(op.first_element(op.instr.inputs[0])?, x.valid[0]);
    runs.sort_by_key(|run| run.row);
    let within = |rows: &Range<usize>| {
        let from = runs.partition_point(|run| run.row < rows.start);
        from..runs.partition_point(|run| run.row < rows.end)
    };
    let (mut of_rows, mut of_columns) = (Vec::new(), Vec::new());
    for matrix in factors.matrices() {
        let [height, width] = [&matrix.rows, &matrix.columns].map(|own| own.len() as f64);
        of_rows.extend(matrix.rows.clone().map(|row| (within(&(row..row + 1)), width)));
        let runs = within(&matrix.rows);
        of_columns.extend(matrix.columns.clone().step_by(TOGETHER).map(|first| {
            let columns = first..matrix.columns.end.min(first + TOGETHER);
            ColumnSum { columns, runs: runs.clone(), count: height }
        }));
    }
    // Padding of the results is zero.
    of_rows.resize(rows.elements(), (0..0, 1.0));
    let [_, end] = factors.totals();
    of_columns.extend((end..columns.elements()).map(|column| ColumnSum {
        columns: column..column + 1,
        runs: 0..0,
        count: 1.0,
    }));
    let means = for_float!(op, x.dtype, T => {
        task(Means::<T> { runs, of_rows, of_columns, x, rows, columns, types: PhantomData })
    })?;
    Ok(vec![means])
}

pub(super) fn direction(op: &Operation<'_>, factors: &Factors) -> Result<Tasks, EngineError> {
    let x = op.input(0);
    let runs = factors.runs(op.first_element(op.instr.inputs[0])?, x.valid[0]);
    let go = (op.instr.inputs.len() > 4).then(|| op.input(4));
    let [rows, columns, by] = [1, 2, 3].map(|i| op.input(i));
    let out = op.output(0);
    let divide = for_float!(op, x.dtype, T => {
        let covered = runs.iter().map(|run| run.elements.clone()).collect();
        task(Divide::<T> { runs, covered, x, rows, columns, by, go, out, types: PhantomData })
    })?;
    Ok(vec![divide])
}

/// Neighbouring columns of one matrix, and the runs of its rows.
struct ColumnSum {
    columns: Range<usize>,
    runs: Range<usize>,
    count: f64,
}

/// The means. A worker sums all of a row or column, so the result does not depend on how many there are.
struct Means<T> {
    /// In the order of rows.
    runs: Vec<RowRun>,
    /// For each row: its runs, and how many columns it has.
    of_rows: Vec<(Range<usize>, f64)>,
    of_columns: Vec<ColumnSum>,
    x: Var,
    rows: Var,
    columns: Var,
    types: PhantomData<T>,
}

impl<T> Means<T> {
    fn own_columns(&self, share: Share) -> impl Iterator<Item = &ColumnSum> {
        self.of_columns.iter().skip(share.worker).step_by(share.workers)
    }
}

impl<T: CpuElement> Task for Means<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let columns = self.own_columns(share).map(|own| self.columns.writes(own.columns.clone()));
        let rows = self.rows.writes(share.of(self.of_rows.len()));
        [self.x.reads_all(), rows].into_iter().chain(columns).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.of_rows.len());
        // SAFETY: the task declared these accesses; results lie over no operand, and are distinct.
        unsafe {
            let rows = cx.get_mut::<T::Acc>(&self.rows, own.clone());
            for (out, (runs, count)) in rows.iter_mut().zip(&self.of_rows[own]) {
                let of_run =
                    |run: &RowRun| sum_of_squares(cx.get::<T>(&self.x, run.elements.clone()));
                let sum: f64 = self.runs[runs.clone()].iter().map(of_run).sum();
                *out = T::Acc::from_f64(sum / count);
            }
            for ColumnSum { columns, runs, count } in self.own_columns(cx.share) {
                let mut sums = [0.0; TOGETHER];
                for RowRun { elements, column, .. } in &self.runs[runs.clone()] {
                    let here = common(&(*column..*column + elements.len()), columns);
                    if here.is_empty() {
                        continue;
                    }
                    let first = elements.start + here.start - column;
                    let values = cx.get::<T>(&self.x, first..first + here.len());
                    add_squares(values, &mut sums[here.start - columns.start..]);
                }
                let out = cx.get_mut::<T::Acc>(&self.columns, columns.clone());
                out.iter_mut()
                    .zip(sums)
                    .for_each(|(out, sum)| *out = T::Acc::from_f64(sum / count));
            }
        }
    }
}

/// Each element by the numbers of its row and column.
struct Divide<T> {
    runs: Vec<RowRun>,
    /// The elements of all runs.
    covered: Vec<Range<usize>>,
    x: Var,
    rows: Var,
    columns: Var,
    by: Var,
    go: Option<Var>,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Divide<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.of(self.x.elements());
        let whole = [&self.rows, &self.columns, &self.by].into_iter().chain(&self.go);
        let own = [self.x.reads(own.clone()), self.out.writes(own)];
        own.into_iter().chain(whole.map(Var::reads_all)).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.x.elements());
        // SAFETY: the task declared these accesses; the result lies over no operand.
        unsafe {
            if self.go.as_ref().is_some_and(|go| cx.scalar(go) == 0.0) {
                return cx.get_mut::<T::Acc>(&self.out, own).fill(T::Acc::ZERO);
            }
            let by = T::Acc::from_f64(cx.scalar(&self.by));
            for gap in gaps(&self.covered, own.clone()) {
                cx.get_mut::<T::Acc>(&self.out, gap).fill(T::Acc::ZERO);
            }
            let from = self.runs.partition_point(|run| run.elements.end <= own.start);
            for RowRun { elements, row, column } in &self.runs[from..] {
                if elements.start >= own.end {
                    break;
                }
                let here = common(elements, &own);
                let column = column + here.start - elements.start;
                divide(
                    cx.get::<T>(&self.x, here.clone()),
                    by / cx.get::<T::Acc>(&self.rows, *row..row + 1)[0],
                    cx.get::<T::Acc>(&self.columns, column..column + here.len()),
                    cx.get_mut::<T::Acc>(&self.out, here),
                );
            }
        }
    }
}
