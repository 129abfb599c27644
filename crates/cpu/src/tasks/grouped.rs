//! Products of packed rows with the matrices of their experts.
//!
//! Workers divide the rows of all experts evenly, of whichever expert, so it costs nothing if some
//! experts have more than others; for the gradients they divide the rows of each matrix. Rows of an
//! expert that lie in several regions are put side by side first, so that a matrix is prepared once for
//! many rows.

mod own;

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::GroupedMatmul;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, for_floats, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::gemm::{Packing, matmul, matmul_scratch};
use crate::kernels::grouped::{CHUNK, Grouped};
use crate::kernels::matrix::{Mat, MatMut};

pub(super) fn product(op: &Operation<'_>, of: GroupedMatmul) -> Result<Tasks, EngineError> {
    let (x, w, counts, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let (grouped, inner) = (grouped(&x, &counts, w.shape[0]), x.valid_width());
    if let Some(unit) = op.products.kernel(x.dtype, out.dtype) {
        return own::product(op, unit, (grouped, of.transposed), [x, w, counts, out]);
    }
    let made = for_float!(op, x.dtype, T => {
        let transposed = of.transposed;
        task(Rows::<T> { grouped, transposed, inner, x, w, counts, out, types: PhantomData })
    })?;
    Ok(vec![made])
}

pub(super) fn gradient(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, y, counts, out) = (op.input(0), op.input(1), op.input(2), op.output(0));
    let grouped = grouped(&x, &counts, out.shape[0]);
    if let Some(unit) = op.products.kernel(x.dtype, out.dtype) {
        return own::gradient(op, unit, grouped, [x, y, counts, out]);
    }
    let made = for_floats!(op, x.dtype, out.dtype, T, C => {
        task(Matrices::<T, C> { grouped, x, y, counts, out, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// How rows lie here.
fn grouped(x: &Var, counts: &Var, experts: usize) -> Grouped {
    let dims = x.shape.len() - 2;
    let (shape, parts) = (&x.shape[..dims], x.shape[0]);
    let valid = |&region: &usize| {
        let mut rest = region;
        (0..dims).rev().all(|dim| {
            let at = rest % shape[dim];
            rest /= shape[dim];
            at < x.valid[dim]
        })
    };
    let all: usize = shape.iter().product();
    Grouped {
        regions: (0..all).filter(valid).collect(),
        of_part: all / parts.max(1),
        parts,
        room: x.shape[dims],
        runs: [counts.width(), counts.valid_width()],
        experts: experts / parts.max(1),
    }
}

/// Elements of an accumulator in whose memory so many of another type fit.
fn room<T: CpuElement>(elements: usize) -> usize {
    (elements * size_of::<T>()).div_ceil(size_of::<T::Acc>())
}

/// Some elements of scratch memory in another type, and the rest.
fn cut<T: CpuElement>(scratch: &mut [T::Acc], elements: usize) -> (&mut [T], &mut [T::Acc]) {
    let (own, rest) = scratch.split_at_mut(room::<T>(elements));
    (&mut bytemuck::cast_slice_mut(own)[..elements], rest)
}

/// The rows in a range of an expert's, side by side: columns from one on, so many.
struct Source<'a, T> {
    rows: *const T,
    width: usize,
    columns: Range<usize>,
    types: PhantomData<&'a [T]>,
}

impl<'a, T: CpuElement> Source<'a, T> {
    /// # Safety
    /// The rows are those of this value, which nobody writes.
    unsafe fn of(cx: &'a Context<'_>, var: &Var, columns: Range<usize>) -> Self {
        Self { rows: cx.ptr::<T>(var), width: var.width(), columns, types: PhantomData }
    }

    /// They stay where they are if they are one piece.
    fn gather<'s>(
        &self,
        grouped: &Grouped,
        (counts, expert): (&[i32], usize),
        range: Range<usize>,
        scratch: &'s mut [T],
    ) -> Mat<'s, T>
    where
        'a: 's,
    {
        let (rows, width) = (range.len(), self.columns.len());
        let mut pieces = grouped.pieces(counts, expert, range.clone());
        if let (Some(only), None) = (pieces.next(), pieces.next()) {
            // SAFETY: the piece lies within the value, as its room says.
            return unsafe {
                let at = self.rows.add(only.rows.start * self.width + self.columns.start);
                Mat::from_raw(at, [rows, width], [self.width as isize, 1])
            };
        }
        for piece in grouped.pieces(counts, expert, range) {
            for (row, at) in piece.rows.zip(piece.at..) {
                let to = &mut scratch[at * width..][..width];
                // SAFETY: as above; scratch memory overlaps no operand.
                unsafe {
                    let from = self.rows.add(row * self.width + self.columns.start);
                    std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), width);
                }
            }
        }
        Mat::rows_of(scratch, rows, width)
    }
}

/// A worker's rows of each expert: workers divide those of all experts evenly.
fn own_rows<'a>(
    grouped: &'a Grouped,
    counts: &'a [i32],
    share: Share,
) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    let experts = 0..grouped.all_experts();
    let own = share.of(experts.clone().map(|expert| grouped.count(counts, expert)).sum());
    let mut first = 0;
    experts.filter_map(move |expert| {
        let end = first + grouped.count(counts, expert);
        let range = own.start.clamp(first, end) - first..own.end.clamp(first, end) - first;
        first = end;
        (!range.is_empty()).then_some((expert, range))
    })
}

/// The matrix of an expert.
///
/// # Safety
/// The task declared that it reads the weights, of type `T`.
unsafe fn matrix_of<'a, T>(cx: &'a Context<'_>, w: &Var, expert: usize) -> Mat<'a, T> {
    let [_, rows, cols] = [0, 1, 2].map(|dim| w.shape[dim]);
    // SAFETY: an expert's matrix lies within the weights.
    unsafe {
        let first = cx.ptr::<T>(w).cast_const().add(expert * rows * cols);
        Mat::from_raw(first, [rows, cols], [cols as isize, 1])
    }
}

/// Zeros in the rows of a result that nobody has.
///
/// # Safety
/// The task declared that it writes the result, of type `T`; each worker calls it once.
unsafe fn clear_rest<T: CpuElement>(
    cx: &Context<'_>,
    grouped: &Grouped,
    counts: &[i32],
    out: &Var,
) {
    let (width, room) = (out.width(), grouped.room.max(1));
    let own = cx.share.of(grouped.all_rows());
    for region in own.start / room..own.end.div_ceil(room) {
        let from = grouped.used(counts, region).end.max(own.start);
        let to = own.end.min((region + 1) * room);
        if from < to {
            // SAFETY: the rows lie within the result, and no other worker clears them.
            unsafe {
                let at = cx.ptr::<T>(out).add(from * width);
                at.write_bytes(0, (to - from) * width);
            }
        }
    }
}

/// Each row times the matrix of its expert.
struct Rows<T> {
    grouped: Grouped,
    transposed: bool,
    /// Elements of a row that are valid.
    inner: usize,
    x: Var,
    w: Var,
    counts: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Rows<T> {
    /// Rows that are multiplied at once.
    fn chunk(&self) -> usize {
        CHUNK.min(self.grouped.all_rows())
    }

    /// # Safety
    /// Workers have different rows, and the task declared its accesses.
    unsafe fn multiply(
        &self,
        cx: &Context<'_>,
        counts: &[i32],
        expert: usize,
        range: Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        let (inner, outer, chunk) = (self.inner, self.out.width(), self.chunk());
        let (near, scratch) = cut::<T>(scratch, chunk * inner);
        let (sums, scratch) = cut::<T>(scratch, chunk * outer);
        // SAFETY: passed on to the caller.
        let (x, w) = unsafe {
            (Source::<T>::of(cx, &self.x, 0..inner), matrix_of::<T>(cx, &self.w, expert))
        };
        let w = if self.transposed { w.t() } else { w }.block(0..inner, 0..outer);
        let out = cx.ptr::<T>(&self.out);
        for start in range.clone().step_by(chunk.max(1)) {
            let part = start..range.end.min(start + chunk);
            let a = x.gather(&self.grouped, (counts, expert), part.clone(), near);
            let mut pieces = self.grouped.pieces(counts, expert, part.clone());
            if let (Some(only), None) = (pieces.next(), pieces.next()) {
                // SAFETY: these rows of the result are this worker's alone.
                let c = unsafe {
                    let at = out.add(only.rows.start * outer);
                    MatMut::from_raw(at, [part.len(), outer], [outer as isize, 1])
                };
                matmul(&Packing, c, a, w, false, scratch);
                continue;
            }
            let c = MatMut::rows_of(&mut *sums, part.len(), outer);
            matmul(&Packing, c, a, w, false, scratch);
            for piece in self.grouped.pieces(counts, expert, part) {
                let from = &sums[piece.at * outer..][..piece.rows.len() * outer];
                // SAFETY: as above.
                unsafe {
                    let to = out.add(piece.rows.start * outer);
                    std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
                }
            }
        }
    }

    fn scratch_elements(&self) -> usize {
        let (chunk, inner, outer) = (self.chunk(), self.inner, self.out.width());
        let copies = room::<T>(chunk * inner) + room::<T>(chunk * outer);
        copies + matmul_scratch::<T, T, T>(chunk, inner, outer)
    }
}

impl<T: CpuElement> Task for Rows<T> {
    /// Who has which rows is not known before.
    fn accesses(&self, _share: Share) -> Vec<Access> {
        let operands = [&self.x, &self.w, &self.counts].map(Var::reads_all);
        operands.into_iter().chain([self.out.writes(0..self.out.elements())]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        // SAFETY: the task declared these accesses; the scratch memory is used once.
        let (counts, scratch) = unsafe {
            let counts = cx.get::<i32>(&self.counts, 0..self.counts.elements());
            (counts, cx.scratch::<T::Acc>(self.scratch_elements()))
        };
        for (expert, range) in own_rows(&self.grouped, counts, cx.share) {
            // SAFETY: rows of different workers are disjoint.
            unsafe { self.multiply(cx, counts, expert, range, scratch) };
        }
        // SAFETY: as above.
        unsafe { clear_rest::<T>(cx, &self.grouped, counts, &self.out) };
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.scratch_elements() * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

/// The gradients of the matrices.
struct Matrices<T, C> {
    grouped: Grouped,
    x: Var,
    y: Var,
    counts: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Matrices<T, C> {
    fn sizes(&self, workers: usize) -> [usize; 3] {
        let rows = self.out.shape[1].div_ceil(workers.max(1));
        [rows, CHUNK.min(self.grouped.all_rows()), self.out.width()]
    }

    /// Sums that are rounded once, where results have another type.
    fn sums(rows: usize, cols: usize) -> usize {
        if size_of::<C>() == size_of::<T::Acc>() { 0 } else { rows * cols }
    }

    fn scratch_elements(&self, workers: usize) -> usize {
        let [rows, chunk, cols] = self.sizes(workers);
        let copies = room::<T>(chunk * rows) + room::<T>(chunk * cols);
        let product = matmul_scratch::<T, T, C>(rows, chunk, cols);
        let apart = matmul_scratch::<T, T, T::Acc>(rows, chunk, cols);
        copies + Self::sums(rows, cols) + product.max(apart)
    }

    /// # Safety
    /// Workers have different rows of the matrices, and the task declared its accesses.
    unsafe fn matrix(
        &self,
        cx: &Context<'_>,
        (counts, expert): (&[i32], usize),
        own: &Range<usize>,
        scratch: &mut [T::Acc],
    ) {
        let ([_, chunk, cols], rows) = (self.sizes(cx.share.workers), own.len());
        let (near, scratch) = cut::<T>(scratch, chunk * rows);
        let (other, scratch) = cut::<T>(scratch, chunk * cols);
        let (sums, scratch) = scratch.split_at_mut(Self::sums(rows, cols));
        // SAFETY: passed on to the caller; these rows of the matrix are this worker's alone.
        let (x, y, mut out) = unsafe {
            let at = (expert * self.out.shape[1] + own.start) * cols;
            let out =
                MatMut::from_raw(cx.ptr::<C>(&self.out).add(at), [rows, cols], [cols as isize, 1]);
            let x = Source::<T>::of(cx, &self.x, own.clone());
            (x, Source::<T>::of(cx, &self.y, 0..cols), out)
        };
        let (count, adds) = (self.grouped.count(counts, expert), cx.adds(&self.out));
        if count == 0 && !adds {
            (0..rows).for_each(|row| out.row(row).fill(C::default()));
        }
        for start in (0..count).step_by(chunk.max(1)) {
            let part = start..count.min(start + chunk);
            let a = x.gather(&self.grouped, (counts, expert), part.clone(), near).t();
            let b = y.gather(&self.grouped, (counts, expert), part, other);
            match sums.is_empty() {
                true => matmul(&Packing, out.reborrow(), a, b, adds || start > 0, scratch),
                false => {
                    let c = MatMut::rows_of(&mut *sums, rows, cols);
                    matmul(&Packing, c, a, b, start > 0, scratch);
                }
            }
        }
        if count > 0 && !sums.is_empty() {
            for (row, sums) in sums.chunks_exact(cols).enumerate() {
                for (out, &sum) in out.row(row).iter_mut().zip(sums) {
                    let before = if adds { out.load() } else { T::Acc::ZERO };
                    *out = C::store(before + sum);
                }
            }
        }
    }
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for Matrices<T, C> {
    fn accesses(&self, _share: Share) -> Vec<Access> {
        let operands = [&self.x, &self.y, &self.counts].map(Var::reads_all);
        operands.into_iter().chain([self.out.writes(0..self.out.elements())]).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.out.shape[1]);
        // SAFETY: the task declared these accesses; the scratch memory is used once.
        let (counts, scratch) = unsafe {
            let counts = cx.get::<i32>(&self.counts, 0..self.counts.elements());
            (counts, cx.scratch::<T::Acc>(self.scratch_elements(cx.share.workers)))
        };
        for expert in 0..self.grouped.all_experts() {
            // SAFETY: rows of different workers are disjoint.
            unsafe { self.matrix(cx, (counts, expert), &own, scratch) };
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        self.scratch_elements(workers) * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
