//! Rotary positions: workers share positions, and the tables are made when the program is compiled.

use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::Rotary;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::rotary;

pub(super) fn compile(op: &Operation<'_>, rotation: &Rotary) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let (seq, head_dim) = (x.shape[1], x.shape[3]);
    let part = op.part(op.instr.inputs[0], 1);
    let frequencies = rotation.frequencies(head_dim);
    let direction = match rotation.inverse {
        false => rotary::Rotation::Forward,
        true => rotary::Rotation::Inverse,
    };
    let made = for_float!(op, x.dtype, T => {
        let mut tables = vec![<T as CpuElement>::Acc::ZERO; seq * head_dim];
        let (cos, sin) = tables.split_at_mut(seq * head_dim / 2);
        rotary::fill_tables((0..seq).map(|i| part.global(i)), &frequencies, cos, sin);
        task(Rotation::<T> { x, out, tables, direction })
    })?;
    Ok(vec![made])
}

struct Rotation<T: CpuElement> {
    x: Var,
    out: Var,
    /// Cosines, then sines.
    tables: Vec<T::Acc>,
    direction: rotary::Rotation,
}

impl<T: CpuElement> Rotation<T> {
    /// Rows are positions; a row is all heads of one.
    fn rows(&self, share: Share) -> Range<usize> {
        share.of(self.x.shape[0] * self.x.shape[1])
    }

    fn elements(&self, rows: &Range<usize>) -> Range<usize> {
        let width = self.x.shape[2] * self.x.shape[3];
        rows.start * width..rows.end * width
    }
}

impl<T: CpuElement> Task for Rotation<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.elements(&self.rows(share));
        vec![self.x.reads(own.clone()), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.rows(cx.share);
        let (cos, sin) = self.tables.split_at(self.tables.len() / 2);
        let turn = rotary::RotaryTables {
            cos,
            sin,
            head_dim: self.x.shape[3],
            heads: self.x.shape[2],
            seq: self.x.shape[1],
            offset: 0,
            first_row: rows.start,
            direction: self.direction,
        };
        let stride = turn.heads * turn.head_dim;
        let own = self.elements(&rows);
        // SAFETY: the task declared these accesses; in place, there is only the one slice.
        unsafe {
            let out = cx.get_mut::<T>(&self.out, own.clone());
            if cx.ptr::<T>(&self.x) == cx.ptr::<T>(&self.out) {
                turn.rotate_in_place(rows.len(), out, stride);
            } else {
                turn.rotate(rows.len(), cx.get::<T>(&self.x, own), stride, out, stride);
            }
        }
    }
}
