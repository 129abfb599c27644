//! Convolutions: patches are gathered a few lines at a time, and multiplied with the weights.
//!
//! The gradient with respect to the images is a convolution too: of dy, by weights whose channels
//! are exchanged. Workers share lines of the result. For the gradient of the weights they share
//! rows of it, and go through all images.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::Window;
use phalanx_ir::{Op, ValueId};

use super::halo;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, for_floats, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::gemm::{Packing, matmul, matmul_scratch};
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::patches::Patches;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (mut tasks, mut operands) = halo::compile(op)?;
    let out = op.output(0);
    let [b, a] = [operands.pop(), operands.pop()].map(|var| var.expect("it has two operands"));
    let [x, y] = [op.instr.inputs[0], op.instr.outputs[0]];
    let made = match &op.instr.op {
        Op::Conv2d(conv) => {
            let patches = patches(op, &conv.window, [x, y], false, &a, &b)?;
            for_float!(op, a.dtype, T => {
                task(Convolution::<T> { patches, from: a, weights: b, out, types: PhantomData })
            })
        }
        Op::Conv2dInputGrad(conv) => {
            let patches = patches(op, &conv.window, [y, x], true, &a, &b)?;
            for_float!(op, a.dtype, T => {
                task(Convolution::<T> { patches, from: a, weights: b, out, types: PhantomData })
            })
        }
        Op::Conv2dWeightGrad(conv) => {
            let patches = patches(op, &conv.window, [x, op.instr.inputs[1]], false, &a, &out)?;
            for_floats!(op, a.dtype, out.dtype, T, C => {
                task(WeightGrad::<T, C> { patches, x: a, dy: b, out, types: PhantomData })
            })
        }
        _ => return Err(op.unsupported("it is no convolution")),
    }?;
    tasks.push(made);
    Ok(tasks)
}

/// How patches are gathered from `from` for these weights.
fn patches(
    op: &Operation<'_>,
    window: &Window,
    of: [ValueId; 2],
    backwards: bool,
    from: &Var,
    weights: &Var,
) -> Result<Patches, EngineError> {
    let taps = [weights.shape[0], weights.shape[1]];
    Ok(Patches { taps, ..gathered(op, window, of, backwards, from)? })
}

/// How what taps read is gathered from `from`, for images and outputs of these values.
pub(super) fn gathered(
    op: &Operation<'_>,
    window: &Window,
    [images, outputs]: [ValueId; 2],
    backwards: bool,
    from: &Var,
) -> Result<Patches, EngineError> {
    let (program, mesh) = (op.program, op.program.mesh());
    let (images, outputs) = (program.ty(images), program.ty(outputs));
    let spans = window.spans(images, outputs, (mesh, op.rank), backwards);
    let spans = spans.ok_or_else(|| op.unsupported("height or width is not sharded in blocks"))?;
    let taps = window.size;
    let (line, channels, valid) = (from.shape[2], from.shape[3], from.valid[3]);
    Ok(Patches { spans, taps, backwards, line, channels, valid })
}

/// Rows of a product at a time: their patches should stay in the cache.
const ROWS: usize = 256;

/// Lines of a result whose patches are gathered at a time: lines that end in padding are not
/// neighbours, and come one by one.
fn lines_at_once(of: &Var) -> usize {
    if of.valid[2] < of.shape[2] { 1 } else { (ROWS / of.shape[2].max(1)).max(1) }
}

/// The elements of some images.
fn images(of: &Var, images: Range<usize>) -> Range<usize> {
    let size: usize = of.shape[1..].iter().product();
    images.start * size..images.end * size
}

struct Convolution<T> {
    patches: Patches,
    from: Var,
    weights: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Convolution<T> {
    /// A worker's lines of the result, counted through all images.
    fn own(&self, share: Share) -> Range<usize> {
        share.of(self.out.shape[0] * self.out.shape[1])
    }

    /// The images that have these lines.
    fn images_of(&self, lines: &Range<usize>) -> Range<usize> {
        let each = self.out.shape[1].max(1);
        if lines.is_empty() { 0..0 } else { lines.start / each..(lines.end - 1) / each + 1 }
    }

    fn elements(&self, lines: &Range<usize>) -> Range<usize> {
        let each = self.out.shape[2] * self.out.shape[3];
        lines.start * each..lines.end * each
    }

    /// Whether the weights are multiplied as they lie in memory: not if their channels are
    /// exchanged, nor if some of what is summed over is padding.
    fn as_they_lie(&self) -> bool {
        let Patches { spans, taps, backwards, channels, valid, .. } = self.patches;
        !backwards && valid == channels && taps == spans.map(|span| span.size)
    }

    /// Elements of scratch: patches, a copy of the weights, and what the product needs.
    fn rooms(&self) -> [usize; 3] {
        let (rows, k) = (lines_at_once(&self.out) * self.out.shape[2], self.patches.width());
        let n = self.out.shape[3];
        let copies = if self.as_they_lie() { 0 } else { k * n };
        let product = matmul_scratch::<T::Acc, T, T>(rows, k, n);
        [rows * k, copies, product.max(matmul_scratch::<T::Acc, T::Acc, T>(rows, k, n))]
    }

    /// The weights as a matrix from patches to results.
    fn copy_weights(&self, weights: &[T], out: &mut [T::Acc]) {
        let (from, to) = (self.patches.channels, self.out.shape[3]);
        for (row, out) in out.chunks_exact_mut(to.max(1)).enumerate() {
            let (tap, channel) = (row / from, row % from);
            let [down, across] = [tap / self.patches.taps[1], tap % self.patches.taps[1]];
            let exists = down < self.patches.spans[0].size && across < self.patches.spans[1].size;
            let exists = exists && channel < self.patches.valid;
            for (column, out) in out.iter_mut().enumerate() {
                *out = match (exists, self.patches.backwards) {
                    (false, _) => T::Acc::ZERO,
                    (true, false) => weights[row * to + column].load(),
                    (true, true) => weights[(tap * to + column) * from + channel].load(),
                };
            }
        }
    }
}

impl<T: CpuElement> Task for Convolution<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        vec![
            self.from.reads(images(&self.from, self.images_of(&own))),
            self.weights.reads_all(),
            self.out.writes(self.elements(&own)),
        ]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        if own.is_empty() {
            return;
        }
        let [rows, copies, product] = self.rooms();
        // SAFETY: the task declared these accesses, and this is the only slice of its scratch.
        let (weights, scratch) = unsafe {
            let weights = cx.get::<T>(&self.weights, 0..self.weights.elements());
            (weights, cx.scratch::<T::Acc>(rows + copies + product))
        };
        let (patches, scratch) = scratch.split_at_mut(rows);
        let (copied, scratch) = scratch.split_at_mut(copies);
        if !self.as_they_lie() {
            self.copy_weights(weights, copied);
        }
        if !self.out.is_full() {
            // SAFETY: the task declared that it writes its own lines.
            unsafe { cx.get_mut::<T>(&self.out, self.elements(&own)) }.fill(T::default());
        }
        let (height, across) = (self.out.shape[1], self.out.valid[2]);
        let [k, n, valid] = [self.patches.width(), self.out.shape[3], self.out.valid[3]];
        for image in self.images_of(&own).take_while(|&image| image < self.out.valid[0]) {
            // SAFETY: the task declared that it reads the images of its lines.
            let from = unsafe { cx.get::<T>(&self.from, images(&self.from, image..image + 1)) };
            let end = own.end.min(image * height + self.out.valid[1]);
            let mut at = own.start.max(image * height);
            while at < end {
                let lines = at..end.min(at + lines_at_once(&self.out));
                let m = lines.len() * across;
                let here = lines.start - image * height..lines.end - image * height;
                self.patches.gather(from, here, across, 0..k, patches);
                let a = Mat::new(&patches[..m * k], [m, k], [k, 1]);
                // SAFETY: the block lies in the worker's own lines, of which no other view is used.
                let c = unsafe {
                    let first = cx.ptr::<T>(&self.out).add(self.elements(&lines).start);
                    MatMut::from_raw(first, [m, valid], [n as isize, 1])
                };
                match self.as_they_lie() {
                    true => {
                        let b = Mat::new(weights, [k, valid], [n, 1]);
                        matmul(&Packing, c, a, b, false, scratch);
                    }
                    false => {
                        let b = Mat::new(&*copied, [k, valid], [n, 1]);
                        matmul(&Packing, c, a, b, false, scratch);
                    }
                }
                at = lines.end;
            }
        }
    }

    fn scratch(&self, _workers: usize) -> usize {
        self.rooms().iter().sum::<usize>() * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}

struct WeightGrad<T, C> {
    patches: Patches,
    x: Var,
    dy: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> WeightGrad<T, C> {
    /// Elements of scratch for a worker with this many rows: patches, sums, and what the product
    /// needs.
    fn rooms(&self, own: usize) -> [usize; 3] {
        let (rows, n) = (lines_at_once(&self.dy) * self.dy.shape[2], self.out.shape[3]);
        [rows * own, own * n, matmul_scratch::<T::Acc, T, T::Acc>(own, rows, n)]
    }

    /// The sums of a worker's rows.
    fn sum(&self, cx: &Context<'_>, own: &Range<usize>, scratch: &mut [T::Acc]) {
        let [rows, sums, _] = self.rooms(own.len());
        let (sums, scratch) = scratch.split_at_mut(sums);
        let (patches, scratch) = scratch.split_at_mut(rows);
        sums.fill(T::Acc::ZERO);
        let (across, n, valid) = (self.dy.valid[2], self.dy.shape[3], self.dy.valid[3]);
        let line = self.dy.shape[2] * n;
        for image in 0..self.dy.valid[0] {
            // SAFETY: the task declared that it reads both operands.
            let (x, dy) = unsafe {
                let x = cx.get::<T>(&self.x, images(&self.x, image..image + 1));
                (x, cx.get::<T>(&self.dy, images(&self.dy, image..image + 1)))
            };
            for at in (0..self.dy.valid[1]).step_by(lines_at_once(&self.dy)) {
                let lines = at..self.dy.valid[1].min(at + lines_at_once(&self.dy));
                let k = lines.len() * across;
                self.patches.gather(x, lines, across, own.clone(), patches);
                let a = Mat::new(&patches[..k * own.len()], [own.len(), k], [1, own.len()]);
                let b = Mat::new(&dy[at * line..], [k, valid], [n, 1]);
                let c = MatMut::rows_of(&mut sums[..own.len() * valid], own.len(), valid);
                matmul(&Packing, c, a, b, true, scratch);
            }
        }
    }
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for WeightGrad<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.out.own_rows(share);
        vec![self.x.reads_all(), self.dy.reads_all(), self.out.writes(self.out.of_rows(&own))]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = self.out.own_rows(cx.share);
        if own.is_empty() {
            return;
        }
        // SAFETY: no other slice of it is in use.
        let scratch = unsafe { cx.scratch::<T::Acc>(self.rooms(own.len()).iter().sum::<usize>()) };
        self.sum(cx, &own, scratch);
        let (adds, valid) = (cx.adds(&self.out), self.dy.valid[3]);
        // SAFETY: the task declared that it writes its own rows.
        let out = unsafe { cx.get_mut::<C>(&self.out, self.out.of_rows(&own)) };
        for (row, out) in out.chunks_exact_mut(self.out.width().max(1)).enumerate() {
            let (here, padding) = out.split_at_mut(valid);
            for (out, sum) in here.iter_mut().zip(&scratch[row * valid..]) {
                let old = if adds { out.load() } else { T::Acc::ZERO };
                *out = C::store(old + *sum);
            }
            if !adds {
                padding.fill(C::default());
            }
        }
    }

    fn scratch(&self, workers: usize) -> usize {
        let own = self.out.rows().div_ceil(workers);
        self.rooms(own).iter().sum::<usize>() * size_of::<T::Acc>()
    }

    fn is_matmul(&self) -> bool {
        true
    }
}
