//! Row-wise ops where a rank holds a part of each row, or some of what it holds is padding.
//!
//! Each row is reduced to a few numbers, over its valid elements. Where the row is sharded, the
//! ranks that share it gather the numbers of all parts in between ([`Exchange`]). Then every rank
//! merges them and finishes its part. Padding comes out as zeros. Whole rows without padding have
//! their own kernels, which need one pass less.

mod row;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use phalanx_engine::EngineError;
use phalanx_ir::{Exchange, Op};

use super::collective::Gather;
use super::extent::{common, gaps};
use super::norm_grad::SumParts;
use super::{Access, Context, Operation, Share, Task, Tasks, for_float, for_floats, task};

use crate::element::{CpuElement, CpuFloat};
use crate::kernels::cross_entropy::gradient_of_part;
use crate::kernels::lowered::{self as kernel, Numbers};
use crate::requirements::NORM_PARTS;
use row::{Gathered, Kind, Shared};

/// The tasks of an op with sharded or padded rows; `None` for whole rows without padding.
pub(super) fn compile(op: &Operation<'_>) -> Result<Option<Tasks>, EngineError> {
    let kind = match &op.instr.op {
        Op::RmsNorm(n) => Kind::RmsNorm { eps: n.eps },
        Op::RmsNormGrad(_) => Kind::RmsNormGrad,
        Op::LayerNorm(n) => Kind::LayerNorm { eps: n.eps },
        Op::LayerNormGrad(_) => Kind::LayerNormGrad,
        Op::Softmax(_) => Kind::Softmax,
        Op::SoftmaxGrad(_) => Kind::SoftmaxGrad,
        Op::CrossEntropy(_) => Kind::CrossEntropy,
        Op::CrossEntropyGrad(_) => Kind::CrossEntropyGrad,
        _ => return Ok(None),
    };
    let x = op.input(0);
    let value = op.instr.inputs[0];
    let part = op.part(value, x.shape.len() - 1);
    let whole = part.shards == 1 && x.valid_width() == x.width();
    if whole && (x.rows_are_full() || !kind.bounds_rows()) {
        return Ok(None);
    }
    if kind.has_targets() && part.start().is_none() {
        return Err(op.unsupported("classes are sharded, but not in blocks"));
    }
    let exchange = Exchange::of(op.program, op.instr);
    let shared = Arc::new(Shared {
        kind,
        inputs: (0..op.instr.inputs.len()).map(|i| op.input(i)).collect(),
        outputs: (0..op.instr.outputs.len()).map(|i| op.output(i)).collect(),
        runs: x.row_runs(),
        width: x.valid_width(),
        total: op.program.ty(value).shape[x.shape.len() - 1],
        part,
        sums: op.scratch,
        gathered: exchange.as_ref().map(|e| Gathered::new(op, e)).transpose()?,
    });
    let mut tasks: Tasks = Vec::new();
    for_float!(op, x.dtype, T => {
        if let (Some(exchange), Some(gathered)) = (&exchange, &shared.gathered) {
            tasks.push(task(Measure::<T> { row: shared.clone(), types: PhantomData }));
            tasks.push(task(Gather::new(op, exchange, gathered.offset)?));
        }
        tasks.push(task(Finish::<T> { row: shared.clone(), types: PhantomData }));
    })?;
    if kind.vectors() > 0 {
        tasks.push(sum_parts(op, &shared)?);
    }
    Ok(Some(tasks))
}

/// The sum of the parts of the rows, for the gradients of gains.
fn sum_parts(op: &Operation<'_>, shared: &Shared) -> Result<Box<dyn Task>, EngineError> {
    let sums = op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
    let vectors = shared.outputs[1..].to_vec();
    for_floats!(op, shared.inputs[0].dtype, vectors[0].dtype, T, C => {
        let total: SumParts<<T as CpuElement>::Acc, C> =
            SumParts { sums, vectors, types: PhantomData };
        task(total)
    })
}

/// Reduces each row to its numbers, and stores them where the numbers of all parts are gathered.
struct Measure<T> {
    row: Arc<Shared>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Measure<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let rows = share.of(self.row.rows());
        let mut accesses = self.row.reads(&rows);
        if let Some(gathered) = &self.row.gathered {
            let bytes = self.row.number_bytes(gathered.own, &rows, size_of::<T::Acc>());
            accesses.push(Access::scratch(gathered.offset, bytes, true));
        }
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let row = &self.row;
        let Some(gathered) = &row.gathered else { return };
        let own = cx.share.of(row.rows());
        let size = size_of::<T::Acc>();
        let first = row.number_bytes(gathered.own, &own, size).start / size;
        // SAFETY: the task declared these accesses; each worker writes its own rows' numbers.
        let numbers = unsafe {
            let start = cx.workspace::<T::Acc>(gathered.offset).add(first);
            std::slice::from_raw_parts_mut(start, own.len() * gathered.numbers)
        };
        numbers.fill(T::Acc::ZERO);
        for run in row.runs.iter().map(|run| common(run, &own)) {
            for index in run {
                // SAFETY: as above.
                let found = unsafe { row.measure::<T>(cx, index) };
                let at = (index - own.start) * gathered.numbers;
                numbers[at..][..gathered.numbers].copy_from_slice(&found[..gathered.numbers]);
            }
        }
    }
}

/// Finishes each row from its numbers.
struct Finish<T> {
    row: Arc<Shared>,
    types: PhantomData<T>,
}

impl<T: CpuElement> Finish<T> {
    /// The parts of the rows that a worker does: fixed ones where rows are summed.
    fn parts(&self, share: Share) -> Range<usize> {
        match self.row.kind.vectors() {
            0 => share.worker..share.worker + 1,
            _ => share.of(NORM_PARTS),
        }
    }

    fn rows(&self, share: Share, part: usize) -> Range<usize> {
        let workers = if self.row.kind.vectors() == 0 { share.workers } else { NORM_PARTS };
        Share { worker: part, workers }.of(self.row.rows())
    }

    /// Elements of the sums of one part.
    fn sums(&self) -> usize {
        self.row.kind.vectors() * self.row.inputs[0].width()
    }

    /// The merged numbers of a row.
    ///
    /// # Safety
    /// The task declared that it reads the row and all parts' numbers of it.
    unsafe fn merged(&self, cx: &Context<'_>, index: usize) -> Numbers<T::Acc> {
        let row = &self.row;
        let Some(gathered) = &row.gathered else {
            // SAFETY: the caller's.
            return unsafe { row.measure::<T>(cx, index) };
        };
        let all = cx.workspace::<T::Acc>(gathered.offset).cast_const();
        row.kind.merge().all(gathered.counts.iter().enumerate().map(|(part, &count)| {
            let at = (part * row.rows() + index) * gathered.numbers;
            let mut numbers = [T::Acc::ZERO; kernel::MOST];
            for (i, number) in numbers[..gathered.numbers].iter_mut().enumerate() {
                // SAFETY: the numbers of every row of every part lie there.
                *number = unsafe { *all.add(at + i) };
            }
            (count, numbers)
        }))
    }

    /// # Safety
    /// The task declared that it reads and writes the row; `sums` are those of its part.
    unsafe fn finish(&self, cx: &Context<'_>, index: usize, sums: &mut [T::Acc]) {
        let row = &self.row;
        let (total, width) = (row.total, row.width);
        // SAFETY: the caller's; results are distinct.
        unsafe {
            let numbers = self.merged(cx, index);
            let out = &row.outputs[0];
            let x = |input: usize| row.row::<T>(cx, input, index);
            let y = || {
                let all = cx.get_mut::<T>(out, index * out.width()..(index + 1) * out.width());
                let (y, padding) = all.split_at_mut(width);
                padding.fill(T::default());
                y
            };
            let keep = |output: usize, number: T::Acc| {
                cx.get_mut::<T::Acc>(&row.outputs[output], index..index + 1)[0] = number;
            };
            let statistic = |input: usize| row.number::<T::Acc>(cx, input, index);
            let (first, second) = sums.split_at_mut(row.inputs[0].width().min(sums.len()));
            let used = width.min(first.len());
            match row.kind {
                Kind::RmsNorm { eps } => {
                    keep(1, kernel::rms_norm([x(0), x(1)], total, eps, numbers, y()));
                }
                Kind::LayerNorm { eps } => {
                    let given = [x(0), x(1), x(2)];
                    let [mean, rstd] = kernel::layer_norm(given, total, eps, numbers, y());
                    keep(1, mean);
                    keep(2, rstd);
                }
                Kind::RmsNormGrad => {
                    let (given, rstd) = ([x(0), x(1), x(3)], statistic(2));
                    let dgamma = &mut first[..used];
                    kernel::rms_norm_gradient(given, total, rstd, numbers, y(), dgamma);
                }
                Kind::LayerNormGrad => {
                    let given = [x(0), x(1), x(4)];
                    let (kept, dx) = ([statistic(2), statistic(3)], y());
                    let gradients = [&mut first[..used], &mut second[..used]];
                    kernel::layer_norm_gradient(given, total, kept, numbers, dx, gradients);
                }
                Kind::Softmax => kernel::softmax(x(0), numbers, y()),
                Kind::SoftmaxGrad => kernel::softmax_gradient([x(0), x(1)], numbers, y()),
                Kind::CrossEntropy | Kind::CrossEntropyGrad => self.loss(cx, index, numbers),
            }
        }
    }

    /// The loss of a row, or the gradient of its logits here.
    ///
    /// # Safety
    /// As for [`Self::finish`].
    unsafe fn loss(&self, cx: &Context<'_>, index: usize, numbers: Numbers<T::Acc>) {
        let (row, out) = (&self.row, &self.row.outputs[0]);
        // SAFETY: the caller's; results are distinct.
        unsafe {
            let target = row.number::<i32>(cx, 1, index);
            let counts = target >= 0 && !row.refuses(cx, target);
            if matches!(row.kind, Kind::CrossEntropy) {
                let lse = numbers[0] + numbers[1].ln();
                let nll = if counts { lse - numbers[2] } else { T::Acc::ZERO };
                for (var, number) in row.outputs.iter().zip([nll, lse]) {
                    cx.get_mut::<T::Acc>(var, index..index + 1)[0] = number;
                }
                return;
            }
            let all = cx.get_mut::<T>(out, index * out.width()..(index + 1) * out.width());
            let (dx, padding) = all.split_at_mut(row.width);
            padding.fill(T::default());
            if !counts {
                return dx.fill(T::default());
            }
            // In place, the logits are already there.
            if cx.ptr::<T>(&row.inputs[0]) != cx.ptr::<T>(out) {
                dx.copy_from_slice(row.row::<T>(cx, 0, index));
            }
            let (lse, d_nll) = (row.number(cx, 2, index), row.number(cx, 3, index));
            gradient_of_part(dx, row.held(target), lse, d_nll);
        }
    }

    /// Zeros for rows of padding.
    ///
    /// # Safety
    /// The task declared that it writes these rows.
    unsafe fn clear(&self, cx: &Context<'_>, rows: &Range<usize>) {
        let row = &self.row;
        for var in &row.outputs[..row.outputs.len() - row.kind.vectors()] {
            let (elements, size) = (row.of_rows(var, rows), var.dtype.size());
            // SAFETY: the caller's.
            unsafe {
                let start = cx.ptr::<u8>(var).add(elements.start * size);
                start.write_bytes(0, elements.len() * size);
            }
        }
    }
}

impl<T: CpuElement> Task for Finish<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let (row, parts) = (&self.row, self.parts(share));
        if parts.is_empty() {
            return vec![];
        }
        let (first, last) = (self.rows(share, parts.start), self.rows(share, parts.end - 1));
        let rows = first.start..last.end;
        let mut accesses = row.reads(&rows);
        let by_row = &row.outputs[..row.outputs.len() - row.kind.vectors()];
        accesses.extend(by_row.iter().map(|v| v.writes(row.of_rows(v, &rows))));
        if let (Some(sums), 1..) = (row.sums, row.kind.vectors()) {
            let bytes = self.sums() * size_of::<T::Acc>();
            let parts = parts.start * bytes..parts.end * bytes;
            accesses.push(Access::scratch(sums, parts, true));
        }
        if let Some(gathered) = &row.gathered {
            let bytes = row.number_bytes(gathered.counts.len(), &(0..0), size_of::<T::Acc>()).end;
            accesses.push(Access::scratch(gathered.offset, 0..bytes, false));
        }
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        for part in self.parts(cx.share) {
            let own = self.rows(cx.share, part);
            // SAFETY: the task declared these accesses; each part has sums of its own.
            unsafe {
                let sums = match self.row.sums {
                    Some(offset) if self.sums() > 0 => {
                        let start = cx.workspace::<T::Acc>(offset).add(part * self.sums());
                        std::slice::from_raw_parts_mut(start, self.sums())
                    }
                    _ => &mut [],
                };
                sums.fill(T::Acc::ZERO);
                for run in self.row.runs.iter().map(|run| common(run, &own)) {
                    run.for_each(|index| self.finish(cx, index, sums));
                }
                gaps(&self.row.runs, own).for_each(|rows| self.clear(cx, &rows));
            }
        }
    }
}
