//! Cross-entropy, alone and fused with its projection.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::LinearCrossEntropy;

use super::padding::{Blank, Spare};
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, for_floats, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::cross_entropy as kernel;
use crate::kernels::gemm::Packing;
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::transpose::transpose;
use crate::requirements::chunk_bytes;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let outputs: Vec<Var> = (0..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let gradient = match &op.instr.op {
        Op::LinearCrossEntropy(fused) => return linear(op, *fused, inputs, outputs),
        Op::CrossEntropyGrad(_) => true,
        _ => false,
    };
    let made = for_float!(op, inputs[0].dtype, T => {
        task(Loss::<T> { gradient, inputs, outputs, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// The loss of rows of logits, or their gradient.
struct Loss<T> {
    gradient: bool,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Loss<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let logits = &self.inputs[0];
        let rows = logits.own_rows(share);
        let part = |var: &Var| {
            if var.shape == logits.shape { logits.of_rows(&rows) } else { rows.clone() }
        };
        let written = self.outputs.iter();
        let reads = self.inputs.iter().map(|v| v.reads(part(v)));
        reads.chain(written.map(|v| v.writes(part(v)))).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let logits = &self.inputs[0];
        let rows = logits.own_rows(cx.share);
        if rows.is_empty() {
            return;
        }
        let (count, width) = (rows.len(), logits.width());
        let elements = logits.of_rows(&rows);
        // SAFETY: the task declared these accesses; in place, only the mutable slice exists.
        unsafe {
            let targets = cx.get::<i32>(&self.inputs[1], rows.clone());
            if !self.valid(cx, targets) {
                return;
            }
            if !self.gradient {
                let x = Mat::rows_of(cx.get::<T>(logits, elements), count, width);
                let nll = cx.get_mut::<T::Acc>(&self.outputs[0], rows.clone());
                let lse = cx.get_mut::<T::Acc>(&self.outputs[1], rows);
                kernel::loss(x, targets, nll, lse);
                return;
            }
            let lse = cx.get::<T::Acc>(&self.inputs[2], rows.clone());
            let d_nll = cx.get::<T::Acc>(&self.inputs[3], rows.clone());
            let out = cx.get_mut::<T>(&self.outputs[0], elements.clone());
            let out = MatMut::rows_of(out, count, width);
            if cx.ptr::<T>(logits) == cx.ptr::<T>(&self.outputs[0]) {
                kernel::gradient_in_place(out, targets, lse, d_nll);
            } else {
                let x = Mat::rows_of(cx.get::<T>(logits, elements), count, width);
                kernel::gradient(x, targets, lse, d_nll, out);
            }
        }
    }
}

impl<T: CpuElement> Loss<T> {
    fn valid(&self, cx: &Context<'_>, targets: &[i32]) -> bool {
        valid(cx, targets, self.inputs[0].width())
    }
}

/// Whether every target names a class; reports the first that does not.
fn valid(cx: &Context<'_>, targets: &[i32], classes: usize) -> bool {
    match targets.iter().find(|&&t| usize::try_from(t).is_ok_and(|t| t >= classes)) {
        None => true,
        Some(t) => {
            cx.failure.report(format!("target {t} is not below the vocabulary size {classes}"));
            false
        }
    }
}

/// Chunks of rows: each worker's rows of a chunk up to their gradient, then the weight's gradient
/// with columns shared.
fn linear(
    op: &Operation<'_>,
    fused: LinearCrossEntropy,
    inputs: Vec<Var>,
    outputs: Vec<Var>,
) -> Result<Tasks, EngineError> {
    let logits = op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
    let size = fused.chunk.min(inputs[0].rows());
    let types = (op.program.ty(op.instr.inputs[0]), op.program.ty(op.instr.inputs[1]));
    let planned = chunk_bytes(&fused, op.program.mesh(), types.0, types.1);
    let other = logits + planned;
    let turn: Box<dyn Task> = for_float!(op, inputs[0].dtype, T => {
        task(Turn::<T> { w: inputs[1].clone(), other, types: PhantomData })
    })?;
    let mut tasks: Tasks = vec![turn];
    let runs = inputs[0].row_runs();
    tasks.extend(Blank::of(&outputs, runs.is_empty()));
    let longest = runs.iter().map(|run| run.len().min(size)).max().unwrap_or(0);
    let used = planned / size.max(1) * longest;
    if used < planned {
        tasks.push(Box::new(Spare { scratch: logits, bytes: used..planned }));
    }
    let chunks = runs.into_iter().flat_map(|run| {
        let end = run.end;
        run.step_by(size.max(1)).map(move |start| start..(start + size).min(end))
    });
    for (index, rows) in chunks.enumerate() {
        let chunk = Chunk {
            transposed: fused.transposed,
            logits,
            other,
            rows,
            first: index == 0,
            inputs: inputs.clone(),
            outputs: outputs.clone(),
        };
        let pair: [Box<dyn Task>; 2] = for_floats!(op, inputs[0].dtype, outputs[2].dtype, T, C => {
            let rows = RowsOf::<T> { chunk: chunk.clone(), types: PhantomData };
            let weight = WeightOf::<T, C> { chunk, types: PhantomData };
            [task(rows), task(weight)]
        })?;
        tasks.extend(pair);
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
struct Chunk {
    transposed: bool,
    /// Offset of the chunk's logits in the workspace.
    logits: usize,
    /// Offset of the transposed w.
    other: usize,
    rows: Range<usize>,
    /// Whether it is the first chunk: later ones add to the weight's gradient.
    first: bool,
    /// x, w, targets, dnll.
    inputs: Vec<Var>,
    /// nll, dx, dw.
    outputs: Vec<Var>,
}

impl Chunk {
    /// The vocabulary, padding included.
    fn extent(&self) -> usize {
        self.inputs[1].elements() / self.inputs[0].width()
    }

    fn classes(&self) -> usize {
        self.inputs[1].valid[usize::from(!self.transposed)]
    }

    fn width(&self) -> usize {
        self.inputs[0].valid_width()
    }

    /// A worker's rows of the chunk, counted from the chunk's start.
    fn own(&self, share: Share) -> Range<usize> {
        share.of(self.rows.len())
    }

    /// A worker's rows, counted from the first of all.
    fn global(&self, own: &Range<usize>) -> Range<usize> {
        self.rows.start + own.start..self.rows.start + own.end
    }

    /// Strides of w and of its gradient as `[width, classes]`.
    fn weight_strides(&self) -> [isize; 2] {
        match self.transposed {
            false => [self.extent() as isize, 1],
            true => [1, self.inputs[0].width() as isize],
        }
    }

    /// w as `[width, classes]` and as `[classes, width]`, both row by row.
    ///
    /// # Safety
    /// The copy has been made, and nothing writes either meanwhile.
    unsafe fn weights<'a, T>(&self, cx: &'a Context<'_>) -> [Mat<'a, T>; 2] {
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
