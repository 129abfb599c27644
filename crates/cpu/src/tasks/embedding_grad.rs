//! The gradient of an embedding's table: each worker owns some of its rows and goes through all ids.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;

use super::placed::held;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};
use crate::element::CpuElement;
use crate::kernels::embedding;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (ids, dy, out, held) = (op.input(0), op.input(1), op.output(0), held(op)?);
    let runs = ids.runs();
    let made = for_floats!(op, dy.dtype, out.dtype, T, C => {
        task(TableGrad::<T, C> { ids, dy, out, held, runs, types: PhantomData })
    })?;
    Ok(vec![made])
}

struct TableGrad<T, C> {
    ids: Var,
    dy: Var,
    out: Var,
    /// Which rows of the table this rank holds.
    held: embedding::HeldRows,
    /// The ids that are not padding.
    runs: Vec<Range<usize>>,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for TableGrad<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.out.own_rows(share);
        vec![self.ids.reads_all(), self.dy.reads_all(), self.out.writes(self.out.of_rows(&rows))]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.out.own_rows(cx.share);
        let held = embedding::HeldRows {
            first: self.held.first + rows.start,
            rows: rows.len(),
            ..self.held
        };
        let mut adds = cx.adds(&self.out);
        // SAFETY: the task declared these accesses.
        let grad = unsafe { cx.get_mut::<C>(&self.out, self.out.of_rows(&rows)) };
        if self.runs.is_empty() && !adds {
            grad.fill(C::default());
        }
        for run in &self.runs {
            // SAFETY: as above.
            let (ids, dy) = unsafe {
                (cx.get::<i32>(&self.ids, run.clone()), cx.get::<T>(&self.dy, self.dy.of_rows(run)))
            };
            let found = embedding::gather_gradient(ids, dy, self.out.width(), held, adds, grad);
            if let Err(unknown) = found {
                cx.failure.report(unknown.to_string());
            }
            adds = true;
        }
    }
}
