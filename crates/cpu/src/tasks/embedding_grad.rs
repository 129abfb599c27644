//! The gradient of an embedding's table: each worker owns some of its rows and goes through all ids.

use std::marker::PhantomData;

use phalanx_engine::EngineError;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};
use crate::element::Element;
use crate::kernels::embedding;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (ids, dy, out) = (op.input(0), op.input(1), op.output(0));
    let made = for_floats!(op, dy.dtype, out.dtype, T, C => {
        task(TableGrad::<T, C> { ids, dy, out, types: PhantomData })
    })?;
    Ok(vec![made])
}

struct TableGrad<T, C> {
    ids: Var,
    dy: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: Element, C: Element<Acc = T::Acc>> Task for TableGrad<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.out.own_rows(share);
        vec![self.ids.reads_all(), self.dy.reads_all(), self.out.writes(self.out.of_rows(&rows))]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.out.own_rows(cx.share);
        let (vocabulary, width) = (self.out.rows(), self.out.width());
        let held = embedding::Held { vocabulary, first: rows.start, rows: rows.len() };
        let adds = cx.adds(&self.out);
        // SAFETY: the task declared these accesses.
        let found = unsafe {
            let ids = cx.get::<i32>(&self.ids, 0..self.ids.elements());
            let dy = cx.get::<T>(&self.dy, 0..self.dy.elements());
            let grad = cx.get_mut::<C>(&self.out, self.out.of_rows(&rows));
            embedding::gather_gradient(ids, dy, width, held, adds, grad)
        };
        if let Err(unknown) = found {
            cx.failure.report(unknown.to_string());
        }
    }
}
