//! Tokens to their places and back. Both ways rows are gathered: each worker owns rows of the
//! result and looks up which rows go there.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::{Op, ValueId};

use super::routing::choices;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::CpuElement;
use crate::kernels::routing::{self, Cells};

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let gates = |at: usize| (op.instr.inputs.len() > at).then(|| op.input(at));
    let made = match &op.instr.op {
        Op::Dispatch(_) => {
            let (x, slots, out) = (op.input(0), op.input(1), op.output(0));
            let (cells, gates) = (cells(op, op.instr.outputs[0], &slots)?, gates(2));
            for_float!(op, x.dtype, T => {
                task(Going::<T> { x, slots, gates, out, cells, types: PhantomData })
            })?
        }
        Op::Combine(_) => {
            let (y, slots, out) = (op.input(0), op.input(1), op.output(0));
            let (cells, gates) = (cells(op, op.instr.inputs[0], &slots)?, gates(2));
            for_float!(op, y.dtype, T => {
                task(Coming::<T> { y, slots, gates, out, cells, types: PhantomData })
            })?
        }
        Op::GateGrad(_) => {
            let (rows, y, slots, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
            let cells = cells(op, op.instr.inputs[1], &slots)?;
            for_float!(op, y.dtype, T => {
                task(Gates::<T> { rows, y, slots, out, cells, types: PhantomData })
            })?
        }
        _ => return Err(op.unsupported("it does not move tokens")),
    };
    Ok(vec![made])
}

/// How dispatched rows lie here.
fn cells(op: &Operation<'_>, value: ValueId, slots: &Var) -> Result<Cells, EngineError> {
    let (whole, here) = (&op.program.ty(value).shape, op.var(value));
    let part = op.part(value, 0);
    let first = part.start().ok_or_else(|| op.unsupported("experts are not sharded in blocks"))?;
    let dims = whole.len();
    Ok(Cells {
        experts: whole[0],
        capacity: whole[dims - 2],
        held: [first, part.len()],
        groups: here.shape[1..dims - 2].iter().product(),
        rows: here.shape[dims - 2],
        choices: choices(slots),
    })
}

struct Going<T> {
    x: Var,
    slots: Var,
    gates: Option<Var>,
    out: Var,
    cells: Cells,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Going<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.out.of_rows(&self.out.own_rows(share));
        let reads = [&self.x, &self.slots].into_iter().chain(&self.gates).map(Var::reads_all);
        reads.chain([self.out.writes(own)]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.out.own_rows(cx.share);
        // SAFETY: the task declared these accesses; the scratch memory is used once.
        let (x, slots, out, found) = unsafe {
            (
                cx.get::<T>(&self.x, 0..self.x.elements()),
                cx.get::<i32>(&self.slots, 0..self.slots.elements()),
                cx.get_mut::<T>(&self.out, self.out.of_rows(&rows)),
                cx.scratch::<i32>(rows.len()),
            )
        };
        let gates: &[T::Acc] = match &self.gates {
            // SAFETY: as above; gates have the accumulator type.
            Some(gates) => unsafe { cx.get(gates, 0..gates.elements()) },
            None => &[],
        };
        self.cells.invert(slots, rows.start, found);
        routing::dispatch(x, self.x.width(), self.slots.width(), found, gates, out);
    }

    fn scratch(&self, workers: usize) -> usize {
        self.out.rows().div_ceil(workers.max(1)) * size_of::<i32>()
    }
}

struct Coming<T> {
    y: Var,
    slots: Var,
    gates: Option<Var>,
    out: Var,
    cells: Cells,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Coming<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let tokens = self.out.own_rows(share);
        let picked = self.slots.of_rows(&tokens);
        let own = [&self.slots].into_iter().chain(&self.gates).map(|v| v.reads(picked.clone()));
        own.chain([self.y.reads_all(), self.out.writes(self.out.of_rows(&tokens))]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let tokens = self.out.own_rows(cx.share);
        let picked = self.slots.of_rows(&tokens);
        // SAFETY: the task declared these accesses, and the types are the values'.
        let (y, slots, out) = unsafe {
            (
                cx.get::<T>(&self.y, 0..self.y.elements()),
                cx.get::<i32>(&self.slots, picked.clone()),
                cx.get_mut::<T>(&self.out, self.out.of_rows(&tokens)),
            )
        };
        let gates: &[T::Acc] = match &self.gates {
            // SAFETY: as above; gates have the accumulator type.
            Some(gates) => unsafe { cx.get(gates, picked) },
            None => &[],
        };
        routing::combine(y, self.y.width(), &self.cells, slots, gates, tokens.start, out);
    }
}

struct Gates<T> {
    rows: Var,
    y: Var,
    slots: Var,
    out: Var,
    cells: Cells,
    types: PhantomData<T>,
}

impl<T: CpuElement> Gates<T> {
    /// A worker's tokens, and their choices.
    fn own(&self, share: Share) -> (Range<usize>, Range<usize>) {
        let tokens = self.rows.own_rows(share);
        let picked = self.slots.of_rows(&tokens);
        (tokens, picked)
    }
}

impl<T: CpuElement> Task for Gates<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (tokens, picked) = self.own(share);
        vec![
            self.rows.reads(self.rows.of_rows(&tokens)),
            self.y.reads_all(),
            self.slots.reads(picked.clone()),
            self.out.writes(picked),
        ]
    }

    fn run(&self, cx: &Context<'_>) {
        let (tokens, picked) = self.own(cx.share);
        // SAFETY: the task declared these accesses, and the types are the values'.
        let (rows, y, slots, out) = unsafe {
            (
                cx.get::<T>(&self.rows, self.rows.of_rows(&tokens)),
                cx.get::<T>(&self.y, 0..self.y.elements()),
                cx.get::<i32>(&self.slots, picked.clone()),
                cx.get_mut::<T::Acc>(&self.out, picked),
            )
        };
        let width = [self.rows.width(), self.rows.valid_width()];
        routing::gate_grad(rows, y, width, &self.cells, slots, tokens.start, out);
    }
}
