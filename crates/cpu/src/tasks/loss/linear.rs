//! Cross-entropy fused with the projection that makes its logits, which exist for a chunk of rows at a time.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::LinearCrossEntropy;

use super::{own, valid};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::cross_entropy as kernel;
use crate::kernels::gemm::Packing;
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::transpose::transpose;
use crate::requirements::LossRoom;
use crate::tasks::padding::{Blank, Spare};
use crate::tasks::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};

/// Chunks of rows: each worker's rows of a chunk up to their gradient, then the weight's gradient
/// with columns shared.
pub(super) fn compile(
    op: &Operation<'_>,
    fused: LinearCrossEntropy,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
) -> Result<Tasks, EngineError> {
    let logits = op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
    let size = fused.chunk.min(inputs[0].rows());
    let types = [0, 1].map(|i| op.program.ty(op.instr.inputs[i]));
    let room = LossRoom::new(&fused, op.products, op.program.mesh(), types);
    let runs = inputs[0].row_runs();
    let mut tasks: Tasks = Blank::of(&outputs, runs.is_empty()).into_iter().collect();
    let longest = runs.iter().map(|run| run.len().min(size)).max().unwrap_or(0);
    let used = room.logits / size.max(1) * longest;
    tasks.extend(Spare::after(logits, used, room.logits));
    let chunks = runs.into_iter().flat_map(|run| {
        let end = run.end;
        run.step_by(size.max(1)).map(move |start| start..(start + size).min(end))
    });
    let chunks = chunks.enumerate().map(|(index, rows)| Chunk {
        transposed: fused.transposed,
        logits,
        other: logits + room.logits,
        rows,
        first: index == 0,
        inputs: inputs.clone(),
        outputs: outputs.clone(),
    });
    let chunks: Vec<Chunk> = chunks.collect();
    if chunks.is_empty() {
        tasks.extend(Spare::after(logits + room.logits, 0, room.operands.iter().sum()));
    }
    tasks.extend(match op.products.kernel(inputs[0].dtype, outputs[2].dtype) {
        Some(kernel) => own::compile(op, kernel, room, chunks)?,
        None => with_library(op, chunks)?,
    });
    Ok(tasks)
}

fn with_library(op: &Operation<'_>, chunks: Vec<Chunk>) -> Result<Tasks, EngineError> {
    let mut tasks = Tasks::new();
    for chunk in chunks {
        let types = [chunk.inputs[0].dtype, chunk.outputs[2].dtype];
        let made: [Box<dyn Task>; 3] = for_floats!(op, types[0], types[1], T, C => {
            let (w, other) = (chunk.inputs[1].clone(), chunk.other);
            let turn = Turn::<T> { w, other, types: PhantomData };
            let rows = RowsOf::<T> { chunk: chunk.clone(), types: PhantomData };
            let weight = WeightOf::<T, C> { chunk, types: PhantomData };
            [task(turn), task(rows), task(weight)]
        })?;
        // The weight is transposed once for all chunks.
        tasks.extend(made.into_iter().skip(usize::from(!tasks.is_empty())));
    }
    Ok(tasks)
}

/// Transposes w, once for all chunks; workers divide its rows.
struct Turn<T> {
    w: Var,
    other: usize,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Turn<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = self.w.own_rows(share);
        // A share of rows becomes a share of columns, which is not one range of bytes.
        let bytes = 0..self.w.elements() * size_of::<T>();
        vec![self.w.reads(self.w.of_rows(&rows)), Access::scratch(self.other, bytes, true)]
    }

    fn run(&self, cx: &Context<'_>) {
        let rows = self.w.own_rows(cx.share);
        let [height, width] = [self.w.rows(), self.w.width()];
        // SAFETY: the task declared these accesses; workers write different columns of the copy.
        unsafe {
            let from = cx.get::<T>(&self.w, self.w.of_rows(&rows));
            let from = Mat::rows_of(from, rows.len(), width);
            let to = cx.workspace::<T>(self.other).add(rows.start);
            let to = MatMut::from_raw(to, [width, rows.len()], [height as isize, 1]);
            transpose(from, to);
        }
    }
}

/// One chunk of rows.
#[derive(Clone)]
pub(super) struct Chunk {
    pub(super) transposed: bool,
    /// Offset of the chunk's logits in the workspace.
    pub(super) logits: usize,
    /// Offset of the transposed w, or of the first panels.
    pub(super) other: usize,
    pub(super) rows: Range<usize>,
    /// Whether it is the first chunk: later ones add to the weight's gradient.
    pub(super) first: bool,
    /// x, w, targets, dnll.
    pub(super) inputs: Vec<Var>,
    /// nll, dx, dw.
    pub(super) outputs: Vec<Var>,
}

impl Chunk {
    /// The vocabulary, padding included.
    pub(super) fn extent(&self) -> usize {
        self.inputs[1].elements() / self.inputs[0].width()
    }

    pub(super) fn classes(&self) -> usize {
        self.inputs[1].valid[usize::from(!self.transposed)]
    }

    pub(super) fn width(&self) -> usize {
        self.inputs[0].valid_width()
    }

    /// A worker's rows of the chunk, counted from the chunk's start.
    pub(super) fn own(&self, share: Share) -> Range<usize> {
        share.of(self.rows.len())
    }

    /// A worker's rows, counted from the first of all.
    pub(super) fn global(&self, own: &Range<usize>) -> Range<usize> {
        self.rows.start + own.start..self.rows.start + own.end
    }

    /// Strides of w and of its gradient as `[width, classes]`.
    pub(super) fn weight_strides(&self) -> [isize; 2] {
        match self.transposed {
            false => [self.extent() as isize, 1],
            true => [1, self.inputs[0].width() as isize],
        }
    }

    /// w as `[width, classes]` and as `[classes, width]`, both row by row.
    ///
    /// # Safety
    /// The copy has been made, and nothing writes either meanwhile.
    pub(super) unsafe fn weights<'a, T>(&self, cx: &'a Context<'_>) -> [Mat<'a, T>; 2] {
        let (width, classes) = (self.width(), self.classes());
        let strides = [self.extent() as isize, self.inputs[0].width() as isize];
        let (given, copy) =
            (cx.ptr::<T>(&self.inputs[1]).cast_const(), cx.workspace::<T>(self.other).cast_const());
        let (plain, turned) = if self.transposed { (copy, given) } else { (given, copy) };
        // SAFETY: both hold all elements of w, in the order that their strides say.
        unsafe {
            [
                Mat::from_raw(plain, [width, classes], [strides[0], 1]),
                Mat::from_raw(turned, [classes, width], [strides[1], 1]),
            ]
        }
    }
}

struct RowsOf<T> {
    chunk: Chunk,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for RowsOf<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let p = &self.chunk;
        let own = p.own(share);
        let rows = p.global(&own);
        let size = size_of::<T::Acc>() * p.classes();
        let written = [(&p.outputs[0], rows.clone()), (&p.outputs[1], p.inputs[0].of_rows(&rows))];
        let mut accesses: Vec<Access> =
            written.into_iter().map(|(v, part)| v.writes(part)).collect();
        accesses.extend([
            p.inputs[0].reads(p.inputs[0].of_rows(&rows)),
            p.inputs[1].reads_all(),
            p.inputs[2].reads(rows),
            p.inputs[3].reads_all(),
            Access::scratch(p.logits, own.start * size..own.end * size, true),
            Access::scratch(p.other, 0..p.inputs[1].elements() * size_of::<T>(), false),
        ]);
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let p = &self.chunk;
        let own = p.own(cx.share);
        if own.is_empty() {
            return;
        }
        let (rows, count) = (p.global(&own), own.len());
        let (width, classes) = (p.width(), p.classes());
        let elements = p.inputs[0].of_rows(&rows);
        // SAFETY: no other slice of it is in use.
        let scratch =
            unsafe { cx.scratch::<T::Acc>(kernel::linear_scratch::<T>(count, width, classes)) };
        // SAFETY: the task declared these accesses; the chunk's logits are its scratch memory, of
        // which each worker uses its own rows; w is described by its own strides.
        unsafe {
            let targets = cx.get::<i32>(&p.inputs[2], rows.clone());
            if !valid(cx, targets, classes) {
                return;
            }
            let row = p.inputs[0].width();
            let x = Mat::rows_of(cx.get::<T>(&p.inputs[0], elements.clone()), count, row);
            let x = x.block(0..count, 0..width);
            let [weight, turned] = p.weights::<T>(cx);
            let logits = cx.workspace::<T::Acc>(p.logits).add(own.start * classes);
            let logits = MatMut::from_raw(logits, [count, classes], [classes as isize, 1]);
            let d_nll = T::Acc::from_f64(cx.scalar(&p.inputs[3]));
            let nll = cx.get_mut::<T::Acc>(&p.outputs[0], rows.clone());
            let dx = cx.get_mut::<T>(&p.outputs[1], elements);
            let dx = MatMut::rows_of(dx, count, row).block(0..count, 0..width);
            kernel::linear_loss_and_gradient(
                &Packing, x, weight, turned, targets, d_nll, logits, nll, dx, scratch,
            );
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        let p = &self.chunk;
        let count = p.rows.len().div_ceil(workers);
        let elements = kernel::linear_scratch::<T>(count, p.width(), p.classes());
        elements * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

struct WeightOf<T, C> {
    chunk: Chunk,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for WeightOf<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let p = &self.chunk;
        let bytes = p.rows.len() * p.classes() * size_of::<T::Acc>();
        let own = share.of(p.classes());
        // Rows of a transposed gradient are contiguous; columns of a plain one are not.
        let written = match p.transposed {
            true => own.start * p.inputs[0].width()..own.end * p.inputs[0].width(),
            false if own.is_empty() => 0..0,
            false => 0..p.outputs[2].elements(),
        };
        let x = p.inputs[0].reads(p.inputs[0].of_rows(&p.rows));
        let logits = Access::scratch(p.logits, 0..bytes, false);
        vec![x, logits, p.outputs[2].writes(written)]
    }

    fn run(&self, cx: &Context<'_>) {
        let p = &self.chunk;
        let own = cx.share.of(p.classes());
        if own.is_empty() {
            return;
        }
        let (width, classes, count) = (p.width(), p.classes(), p.rows.len());
        let adds = !p.first || cx.adds(&p.outputs[2]);
        // SAFETY: no other slice of it is in use.
        let scratch =
            unsafe { cx.scratch(kernel::linear_weight_scratch::<T, C>(count, width, own.len())) };
        // SAFETY: the task declared these accesses; each worker writes its own classes of the
        // gradient, which is described by the strides of w.
        unsafe {
            let x = cx.get::<T>(&p.inputs[0], p.inputs[0].of_rows(&p.rows));
            let x = Mat::rows_of(x, count, p.inputs[0].width()).block(0..count, 0..width);
            let logits = cx.workspace::<T::Acc>(p.logits);
            let logits =
                Mat::from_raw(logits.cast_const(), [count, classes], [classes as isize, 1]);
            let dw =
                MatMut::from_raw(cx.ptr::<C>(&p.outputs[2]), [width, classes], p.weight_strides());
            let (logits, dw) =
                (logits.block(0..count, own.clone()), dw.block(0..width, own.clone()));
            kernel::linear_weight_gradient(&Packing, x, logits, dw, adds, scratch);
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        let p = &self.chunk;
        let columns = p.classes().div_ceil(workers);
        let elements = kernel::linear_weight_scratch::<T, C>(p.rows.len(), p.width(), columns);
        elements * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
