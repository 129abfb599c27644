//! Products of packed rows by own micro-kernels: each worker packs the matrices of the experts that it
//! multiplies with, and reads rows where they lie.
//!
//! For the gradients workers divide the multiplications, not the matrices: an expert with twice the rows
//! counts twice. What is summed at once is the same for any number of workers, and so are the bits.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;
use phalanx_engine::EngineError;
use phalanx_ir::DType;

use super::{Source, clear_rest, matrix_of, own_rows};
use crate::element::CpuElement;
use crate::kernels::grouped::{CHUNK, Grouped};
use crate::kernels::matrix::{Mat, MatMut};
use crate::products::{
    MicroKernel, PanelElement, multiply_packed, multiply_scratch_up_to, pack_whole, packed_words,
};
use crate::tasks::{Access, Context, Operation, Share, Task, Tasks, Var, task};

pub(super) fn product(
    op: &Operation<'_>,
    unit: MicroKernel,
    (grouped, transposed): (Grouped, bool),
    [x, w, counts, out]: [Var; 4],
) -> Result<Tasks, EngineError> {
    let inner = x.valid_width();
    macro_rules! rows {
        ($E:ty) => {
            task(Rows::<$E> {
                unit,
                grouped,
                transposed,
                inner,
                x,
                w,
                counts,
                out,
                types: PhantomData,
            })
        };
    }
    match x.dtype {
        DType::Bf16 => Ok(vec![rows!(bf16)]),
        DType::F32 => Ok(vec![rows!(f32)]),
        other => Err(op.unsupported(format!("it has no own products of {other}"))),
    }
}

pub(super) fn gradient(
    op: &Operation<'_>,
    unit: MicroKernel,
    grouped: Grouped,
    [x, y, counts, out]: [Var; 4],
) -> Result<Tasks, EngineError> {
    macro_rules! matrices {
        ($E:ty, $C:ty) => {
            task(Matrices::<$E, $C> { unit, grouped, x, y, counts, out, types: PhantomData })
        };
    }
    match (x.dtype, out.dtype) {
        (DType::Bf16, DType::Bf16) => Ok(vec![matrices!(bf16, bf16)]),
        (DType::Bf16, DType::F32) => Ok(vec![matrices!(bf16, f32)]),
        (DType::F32, DType::F32) => Ok(vec![matrices!(f32, f32)]),
        (x, dw) => Err(op.unsupported(format!("it has no own product of {x} for {dw}"))),
    }
}

/// Columns of a matrix that are packed at once: whole panels, so few that they take little memory.
const COLUMNS: usize = 512;

/// Each row times the matrix of its expert.
struct Rows<E> {
    unit: MicroKernel,
    grouped: Grouped,
    transposed: bool,
    /// Elements of a row that are valid.
    inner: usize,
    x: Var,
    w: Var,
    counts: Var,
    out: Var,
    types: PhantomData<E>,
}

impl<E: PanelElement> Rows<E> {
    /// # Safety
    /// Workers have different rows, and the task declared its accesses.
    unsafe fn multiply(
        &self,
        cx: &Context<'_>,
        (counts, expert): (&[i32], usize),
        range: Range<usize>,
        scratch: &mut [u32],
    ) {
        let (inner, outer, width) = (self.inner, self.out.width(), self.x.width());
        let most = packed_words::<E>(inner, outer.min(COLUMNS));
        let (panels, scratch) = scratch.split_at_mut(most);
        // SAFETY: passed on to the caller.
        let w = unsafe { matrix_of::<E>(cx, &self.w, expert) };
        let w = if self.transposed { w.t() } else { w };
        let (x, out) = (cx.ptr::<E>(&self.x).cast_const(), cx.ptr::<E>(&self.out));
        for first in (0..outer).step_by(COLUMNS) {
            let columns = first..outer.min(first + COLUMNS);
            let right = pack_whole(&self.unit, w.block(0..inner, columns.clone()), panels);
            let right = right.whole(&self.unit);
            for piece in self.grouped.pieces(counts, expert, range.clone()) {
                let (at, rows) = (piece.rows.start, piece.rows.len());
                // SAFETY: the piece lies within both values, as its room says, and these rows of the
                // result are this worker's alone.
                let (x, out) = unsafe {
                    let x = Mat::from_raw(x.add(at * width), [rows, inner], [width as isize, 1]);
                    let shape = ([rows, outer], [outer as isize, 1]);
                    (x, MatMut::from_raw(out.add(at * outer), shape.0, shape.1))
                };
                let out = out.block(0..rows, columns.clone());
                multiply_packed(&self.unit, x, right.clone(), out, false, scratch);
            }
        }
    }

    fn words(&self) -> usize {
        let rows = self.grouped.room.max(1);
        packed_words::<E>(self.inner, self.out.width().min(COLUMNS))
            + multiply_scratch_up_to::<E>(&self.unit, rows, [self.inner, 1])
    }
}

impl<E: PanelElement> Task for Rows<E> {
    /// Who has which rows is not known before.
    fn accesses(&self, _share: Share) -> Vec<Access> {
        let operands = [&self.x, &self.w, &self.counts].map(Var::reads_all);
        operands.into_iter().chain([self.out.writes(0..self.out.elements())]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        // SAFETY: the task declared these accesses; the scratch memory is used once, and rows of different
        // workers are disjoint.
        unsafe {
            let counts = cx.get::<i32>(&self.counts, 0..self.counts.elements());
            let scratch = cx.scratch::<u32>(self.words());
            for (expert, range) in own_rows(&self.grouped, counts, cx.share) {
                self.multiply(cx, (counts, expert), range, scratch);
            }
            clear_rest::<E>(cx, &self.grouped, counts, &self.out);
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.words() * size_of::<u32>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

/// Rows of a matrix that a worker takes at least, and a multiple of which it takes.
const GRAIN: usize = 32;

/// Rows of a matrix whose sums are kept until they are rounded.
const ROUNDED: usize = 192;

/// The gradients of the matrices.
struct Matrices<E, C> {
    unit: MicroKernel,
    grouped: Grouped,
    x: Var,
    y: Var,
    counts: Var,
    out: Var,
    types: PhantomData<(E, C)>,
}

impl<E: PanelElement, C: CpuElement<Acc = f32>> Matrices<E, C> {
    /// Rows that are summed at once.
    fn chunk(&self) -> usize {
        CHUNK.min(self.grouped.all_rows())
    }

    /// Rows of a matrix that are computed at once.
    fn most(&self) -> usize {
        let rows = self.out.shape[1];
        if C::DTYPE == DType::F32 { rows } else { rows.min(ROUNDED) }
    }

    /// A worker's rows of all matrices, cut so that all multiply equally often.
    fn own<'a>(
        &'a self,
        counts: &'a [i32],
        share: Share,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
        let rows = self.out.shape[1];
        // A matrix without any rows is cleared, which costs something, too.
        let each = |expert: usize| self.grouped.count(counts, expert) + 1;
        let experts = 0..self.grouped.all_experts();
        let own = share.of(experts.clone().map(each).sum::<usize>() * rows);
        let mut first = 0;
        experts.filter_map(move |expert| {
            let each = each(expert);
            let cut = |place: usize| {
                let row = place.clamp(first, first + each * rows) - first;
                row.div_ceil(each).next_multiple_of(GRAIN).min(rows)
            };
            let range = cut(own.start)..cut(own.end);
            first += each * rows;
            (!range.is_empty()).then_some((expert, range))
        })
    }

    /// # Safety
    /// Workers have different rows of the matrices, and the task declared its accesses.
    unsafe fn matrix(
        &self,
        cx: &Context<'_>,
        (counts, expert): (&[i32], usize),
        own: Range<usize>,
        scratch: &mut [u32],
    ) {
        let (cols, rows) = (self.out.width(), own.len());
        // SAFETY: passed on to the caller; these rows of the matrix are this worker's alone.
        let (x, y, mut out) = unsafe {
            let at = (expert * self.out.shape[1] + own.start) * cols;
            let shape = ([rows, cols], [cols as isize, 1]);
            let out = MatMut::from_raw(cx.ptr::<C>(&self.out).add(at), shape.0, shape.1);
            let x = Source::<E>::of(cx, &self.x, own);
            (x, Source::<E>::of(cx, &self.y, 0..cols), out)
        };
        let mut scratch = scratch;
        let mut take = |words: usize| -> &mut [u32] {
            let (front, rest) = std::mem::take(&mut scratch).split_at_mut(words);
            scratch = rest;
            front
        };
        let [near, other, sums, panels] = self.pieces(rows).map(&mut take);
        let scratch = scratch;
        let (near, other): (&mut [E], &mut [E]) =
            (bytemuck::cast_slice_mut(near), bytemuck::cast_slice_mut(other));
        let sums: &mut [f32] = bytemuck::cast_slice_mut(sums);
        let (count, adds) = (self.grouped.count(counts, expert), cx.adds(&self.out));
        if count == 0 && !adds {
            (0..rows).for_each(|row| out.row(row).fill(C::default()));
        }
        for start in (0..count).step_by(self.chunk().max(1)) {
            let part = start..count.min(start + self.chunk());
            let a = x.gather(&self.grouped, (counts, expert), part.clone(), near).t();
            let b = y.gather(&self.grouped, (counts, expert), part, other);
            let right = pack_whole(&self.unit, b, panels).whole(&self.unit);
            match sums.is_empty() {
                true => {
                    let adds = adds || start > 0;
                    multiply_packed(&self.unit, a, right, out.reborrow(), adds, scratch);
                }
                false => {
                    let to = MatMut::rows_of(&mut *sums, rows, cols);
                    multiply_packed(&self.unit, a, right, to, start > 0, scratch);
                }
            }
        }
        for (row, sums) in sums.chunks_exact(cols.max(1)).enumerate().filter(|_| count > 0) {
            for (out, &sum) in out.row(row).iter_mut().zip(sums) {
                *out = C::store(if adds { out.load() + sum } else { sum });
            }
        }
    }

    /// Words of scratch for so many rows of a matrix: rows of both operands side by side, sums that are
    /// rounded once, and a packed operand.
    fn pieces(&self, rows: usize) -> [usize; 4] {
        let (cols, chunk) = (self.out.width(), self.chunk());
        let sums = if C::DTYPE == DType::F32 { 0 } else { rows * cols };
        let copied = [rows, cols].map(|columns| (chunk * columns).div_ceil(E::PER_WORD));
        [copied[0], copied[1], sums, packed_words::<E>(chunk, cols)]
    }

    fn words(&self) -> usize {
        let most = self.most();
        let pieces: usize = self.pieces(most).iter().sum();
        pieces + multiply_scratch_up_to::<E>(&self.unit, most, [self.chunk(), 0])
    }
}

impl<E: PanelElement, C: CpuElement<Acc = f32>> Task for Matrices<E, C> {
    fn accesses(&self, _share: Share) -> Vec<Access> {
        let operands = [&self.x, &self.y, &self.counts].map(Var::reads_all);
        operands.into_iter().chain([self.out.writes(0..self.out.elements())]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let most = self.most();
        // SAFETY: the task declared these accesses; the scratch memory is used once, and rows of different
        // workers are disjoint.
        unsafe {
            let counts = cx.get::<i32>(&self.counts, 0..self.counts.elements());
            let scratch = cx.scratch::<u32>(self.words());
            for (expert, own) in self.own(counts, cx.share) {
                for start in own.clone().step_by(most.max(1)) {
                    let rows = start..own.end.min(start + most);
                    self.matrix(cx, (counts, expert), rows, scratch);
                }
            }
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.words() * size_of::<u32>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
