//! Ops whose results depend on the global position of a rank's elements (dropout, rotary,
//! embeddings), if rows are padded or dims other than the first are sharded.
//!
//! Whole values, and those of which a rank holds whole samples, have faster tasks elsewhere.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::{Noise, NoiseKind, Rotary};
use phalanx_ir::random::{normal_at, uniform_at};
use phalanx_ir::{LocalPart, Op};

use super::extent::{common, gaps};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::dropout::{Mask, dropout_of_sample};
use crate::kernels::embedding::{HeldRows, gather};
use crate::kernels::rotary;

/// The tasks of such an op; `None` if it does not need them.
pub(super) fn compile(op: &Operation<'_>) -> Result<Option<Tasks>, EngineError> {
    let made = match &op.instr.op {
        Op::Dropout(d) if !whole_samples(op) => {
            let (mask, places) = (Mask { key: [0; 5], site: d.site, p: d.p }, Places::of(op));
            let (x, key, out) = (op.input(0), op.input(1), op.output(0));
            for_float!(op, x.dtype, T => {
                task(Drop::<T> { mask, places, x, key, out, types: PhantomData })
            })?
        }
        Op::Rotary(r) if op.input(0).valid[3] < op.input(0).shape[3] => rotation(op, r)?,
        Op::Embedding(_) if !op.input(1).is_full() => {
            let (table, ids, out, held) = (op.input(0), op.input(1), op.output(0), held(op)?);
            let runs = ids.runs();
            for_float!(op, table.dtype, T => {
                task(Lookup::<T> { table, ids, out, held, runs, types: PhantomData })
            })?
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

/// Random numbers, by the places of a rank's elements in the whole.
pub(super) fn noise(op: &Operation<'_>, noise: Noise) -> Result<Tasks, EngineError> {
    let (key, out, places) = (op.input(1), op.output(0), Places::of(op));
    Ok(vec![for_float!(op, out.dtype, T => {
        task(Numbers::<T> { noise, places, key, out, types: PhantomData })
    })?])
}

/// Whether a rank holds whole samples of the first operand, one after the other and unpadded.
fn whole_samples(op: &Operation<'_>) -> bool {
    let (x, parts) = (op.input(0), op.parts(op.instr.inputs[0]));
    let inner = parts.iter().skip(1).all(|part| part.shards == 1);
    let first = parts.first().is_some_and(|part| part.start().is_some());
    first && inner && x.valid.iter().zip(&x.shape).skip(1).all(|(valid, size)| valid == size)
}

/// The number of the first sample that a rank holds, where it holds whole ones.
pub(super) fn first_sample(op: &Operation<'_>) -> usize {
    op.parts(op.instr.inputs[0]).first().and_then(|part| part.start()).unwrap_or(0)
}

/// Which rows of an embedding's table a rank holds.
pub(super) fn held(op: &Operation<'_>) -> Result<HeldRows, EngineError> {
    let table = match op.instr.op {
        Op::Embedding(_) => op.instr.inputs[0],
        _ => op.instr.outputs[0],
    };
    let part = op.part(table, 0);
    let first = part.start().ok_or_else(|| op.unsupported("its table is not sharded in blocks"))?;
    Ok(HeldRows { vocabulary: op.program.ty(table).shape[0], first, rows: part.len() })
}

/// Where the rows of a value lie in the whole.
struct Places {
    parts: Vec<LocalPart>,
    /// The whole value's shape.
    shape: Vec<usize>,
}

impl Places {
    /// Those of the first operand.
    fn of(op: &Operation<'_>) -> Self {
        let value = op.instr.inputs[0];
        Self { parts: op.parts(value), shape: op.program.ty(value).shape.clone() }
    }

    /// The sample that element `at` of a row belongs to, and its number there. A value without dims is one
    /// sample of one element.
    fn element(&self, row: usize, at: usize) -> (usize, usize) {
        match *self.parts {
            [] => (0, 0),
            [samples] => (samples.global(at), 0),
            [.., last] => {
                let (sample, first) = self.row(row);
                (sample, first + last.global(at))
            }
        }
    }

    /// The sample that a row (all dims but the last) belongs to, and the number of its first
    /// element there; a row of padding has a meaningless number.
    fn row(&self, row: usize) -> (usize, usize) {
        let (mut rest, mut stride, mut element) = (row, self.shape[self.shape.len() - 1], 0);
        for (part, size) in self.parts.iter().zip(&self.shape).skip(1).rev().skip(1) {
            element += part.global(rest % part.len()) * stride;
            rest /= part.len();
            stride *= size;
        }
        (self.parts[0].global(rest), element)
    }
}

struct Drop<T> {
    mask: Mask,
    places: Places,
    x: Var,
    key: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Drop<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.x.of_rows(&self.x.own_rows(share));
        vec![self.x.reads(own.clone()), self.key.reads_all(), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let width = self.x.width();
        // SAFETY: the task declared that it reads its key, which has five words.
        let words = unsafe { cx.get::<i32>(&self.key, 0..5) };
        let mask = Mask { key: std::array::from_fn(|i| words[i]), ..self.mask };
        for row in self.x.own_rows(cx.share) {
            let elements = row * width..(row + 1) * width;
            // SAFETY: the task declared these accesses.
            let (x, out) = unsafe {
                (cx.get::<T>(&self.x, elements.clone()), cx.get_mut(&self.out, elements))
            };
            match *self.places.parts {
                // A value without dims is one sample of one element.
                [] => dropout_of_sample(x, mask, 0, 0, out),
                [samples] => {
                    for (i, (x, out)) in x.iter().zip(out).enumerate() {
                        let (x, out) = (std::slice::from_ref(x), std::slice::from_mut(out));
                        dropout_of_sample(x, mask, samples.global(i), 0, out);
                    }
                }
                [.., last] => {
                    let (sample, first) = self.places.row(row);
                    let mut at = 0;
                    while at < width {
                        let end = at + last.run(at);
                        let (x, out) = (&x[at..end], &mut out[at..end]);
                        dropout_of_sample(x, mask, sample, first + last.global(at), out);
                        at = end;
                    }
                }
            }
        }
    }
}

struct Numbers<T> {
    noise: Noise,
    places: Places,
    key: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Numbers<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.out.of_rows(&self.out.own_rows(share));
        vec![self.key.reads_all(), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let width = self.out.width();
        // SAFETY: the task declared that it reads its key, which has five words.
        let words = unsafe { cx.get::<i32>(&self.key, 0..5) };
        let key = std::array::from_fn(|i| words[i]);
        let draw = match self.noise.kind {
            NoiseKind::Uniform => uniform_at,
            NoiseKind::Normal => normal_at,
        };
        for row in self.out.own_rows(cx.share) {
            // SAFETY: the task declared this access.
            let out = unsafe { cx.get_mut::<T>(&self.out, row * width..(row + 1) * width) };
            for (at, out) in out.iter_mut().enumerate() {
                let (sample, element) = self.places.element(row, at);
                let number = draw(key, self.noise.site, sample as u64, element as u64);
                *out = T::store(T::Acc::from_f64(number));
            }
        }
    }
}

/// Rotary over padded heads: the valid elements of each head are rotated, the rest is zero.
fn rotation(op: &Operation<'_>, r: &Rotary) -> Result<Box<dyn Task>, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let (seq, part) = (x.shape[1], op.part(op.instr.inputs[0], 1));
    let frequencies = r.frequencies(x.valid[3]);
    let direction = match r.inverse {
        false => rotary::Rotation::Forward,
        true => rotary::Rotation::Inverse,
    };
    for_float!(op, x.dtype, T => {
        let mut tables = vec![<T as CpuElement>::Acc::ZERO; seq * x.valid[3]];
        let (cos, sin) = tables.split_at_mut(seq * x.valid[3] / 2);
        rotary::fill_tables((0..seq).map(|i| part.global(i)), &frequencies, cos, sin);
        task(Turn::<T> { x, out, tables, direction })
    })
}

struct Turn<T: CpuElement> {
    x: Var,
    out: Var,
    /// Cosines, then sines.
    tables: Vec<T::Acc>,
    direction: rotary::Rotation,
}

impl<T: CpuElement> Turn<T> {
    /// A worker's positions, and the elements of all their heads.
    fn own(&self, share: Share) -> (Range<usize>, Range<usize>) {
        let rows = share.of(self.x.shape[0] * self.x.shape[1]);
        let width = self.x.shape[2] * self.x.shape[3];
        (rows.clone(), rows.start * width..rows.end * width)
    }
}

impl<T: CpuElement> Task for Turn<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (_, own) = self.own(share);
        vec![self.x.reads(own.clone()), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let (cos, sin) = self.tables.split_at(self.tables.len() / 2);
        let (seq, stride, valid) = (self.x.shape[1], self.x.shape[3], self.x.valid[3]);
        for row in self.own(cx.share).0 {
            let turn = rotary::RotaryTables {
                cos,
                sin,
                head_dim: valid,
                heads: 1,
                seq: 1,
                offset: row % seq,
                first_row: 0,
                direction: self.direction,
            };
            for head in (row * self.x.shape[2]..).take(self.x.shape[2]) {
                let elements = head * stride..head * stride + stride;
                // SAFETY: the task declared these accesses; in place, only this slice is used.
                unsafe {
                    let in_place = cx.ptr::<T>(&self.x) == cx.ptr::<T>(&self.out);
                    let out = cx.get_mut::<T>(&self.out, elements.clone());
                    if !in_place {
                        out.copy_from_slice(cx.get::<T>(&self.x, elements));
                    }
                    turn.rotate_in_place(1, &mut out[..valid], stride);
                    out[valid..].fill(T::default());
                }
            }
        }
    }
}

/// Rows of a table by ids, some of which are padding.
struct Lookup<T> {
    table: Var,
    ids: Var,
    out: Var,
    held: HeldRows,
    runs: Vec<Range<usize>>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Lookup<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = share.of(self.ids.elements());
        let out = self.out.of_rows(&rows);
        vec![self.table.reads_all(), self.ids.reads(rows), self.out.writes(out)]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.ids.elements());
        // SAFETY: the task declared these accesses.
        let table = unsafe { cx.get::<T>(&self.table, 0..self.table.elements()) };
        // SAFETY: as above.
        let out =
            |rows: &Range<usize>| unsafe { cx.get_mut::<T>(&self.out, self.out.of_rows(rows)) };
        for run in self.runs.iter().map(|run| common(run, &own)) {
            // SAFETY: as above.
            let ids = unsafe { cx.get::<i32>(&self.ids, run.clone()) };
            if let Err(unknown) = gather(table, self.held, self.table.width(), ids, out(&run)) {
                cx.failure.report(unknown.to_string());
            }
        }
        gaps(&self.runs, own).for_each(|rows| out(&rows).fill(T::default()));
    }
}
