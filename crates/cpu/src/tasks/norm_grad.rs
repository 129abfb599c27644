//! Gradients of norms: rows of dx and sums of parts of the rows; then the sum of the parts.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::norm;
use crate::requirements::NORM_PARTS;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let inputs: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    let dx = op.output(0);
    let vectors: Vec<Var> = (1..op.instr.outputs.len()).map(|i| op.output(i)).collect();
    let sums = op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
    for_floats!(op, dx.dtype, vectors[0].dtype, T, C => {
        let total = SumParts { sums, vectors: vectors.clone(), types: PhantomData };
        let total: SumParts<<T as CpuElement>::Acc, C> = total;
        let rows = NormGrad::<T, C> { inputs, dx, vectors, sums, types: PhantomData };
        let tasks: Tasks = vec![task(rows), task(total)];
        tasks
    })
}

struct NormGrad<T, C> {
    inputs: Vec<Var>,
    dx: Var,
    vectors: Vec<Var>,
    /// Offset of the parts' sums in the workspace.
    sums: usize,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> NormGrad<T, C> {
    /// The rows of one of the fixed parts.
    fn rows(&self, part: usize) -> Range<usize> {
        Share { worker: part, workers: NORM_PARTS }.of(self.dx.rows())
    }

    /// Bytes of one part's sums.
    fn part_bytes(&self) -> usize {
        self.vectors.len() * self.dx.width() * size_of::<T::Acc>()
    }
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for NormGrad<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let parts = share.of(NORM_PARTS);
        if parts.is_empty() {
            return vec![];
        }
        let rows = self.rows(parts.start).start..self.rows(parts.end - 1).end;
        let statistics = 2..self.inputs.len() - 1;
        let mut accesses = vec![
            self.inputs[0].reads(self.dx.of_rows(&rows)),
            self.inputs[1].reads_all(),
            self.inputs[statistics.end].reads(self.dx.of_rows(&rows)),
            self.dx.writes(self.dx.of_rows(&rows)),
        ];
        accesses.extend(statistics.map(|i| self.inputs[i].reads(rows.clone())));
        let bytes = parts.start * self.part_bytes()..parts.end * self.part_bytes();
        accesses.push(Access::scratch(self.sums, bytes, true));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        for part in cx.share.of(NORM_PARTS) {
            let rows = self.rows(part);
            let elements = self.dx.of_rows(&rows);
            let width = self.dx.width();
            // SAFETY: the task declared these accesses, and the types are the values'; the parts'
            // sums lie one after the other in the instruction's scratch memory.
            unsafe {
                let sums = cx.workspace::<T::Acc>(self.sums).add(part * self.vectors.len() * width);
                let sums = std::slice::from_raw_parts_mut(sums, self.vectors.len() * width);
                sums.fill(T::Acc::ZERO);
                let (first, second) = sums.split_at_mut(width);
                let x = cx.get::<T>(&self.inputs[0], elements.clone());
                let gamma = cx.get::<T>(&self.inputs[1], 0..width);
                let dy = cx.get::<T>(&self.inputs[self.inputs.len() - 1], elements.clone());
                let dx = cx.get_mut::<T>(&self.dx, elements);
                let statistic = |i: usize| cx.get::<T::Acc>(&self.inputs[i], rows.clone());
                if self.vectors.len() == 1 {
                    norm::rms_norm_gradient(x, gamma, statistic(2), dy, dx, first);
                } else {
                    let normed =
                        norm::LayerNormed { x, gamma, mean: statistic(2), rstd: statistic(3) };
                    norm::layer_norm_gradient(normed, dy, dx, first, second);
                }
            }
        }
    }
}

/// The sum of the parts, in their order; the columns of each vector are shared.
pub(super) struct SumParts<A, C> {
    pub(super) sums: usize,
    pub(super) vectors: Vec<Var>,
    pub(super) types: PhantomData<(A, C)>,
}

impl<A: CpuFloat, C: CpuElement<Acc = A>> Task for SumParts<A, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.of(self.vectors[0].elements());
        let bytes = NORM_PARTS * self.vectors.len() * self.vectors[0].elements() * size_of::<A>();
        let mut accesses = vec![Access::scratch(self.sums, 0..bytes, false)];
        accesses.extend(self.vectors.iter().map(|v| v.writes(own.clone())));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let width = self.vectors[0].elements();
        let own = cx.share.of(width);
        for (index, var) in self.vectors.iter().enumerate() {
            let adds = cx.adds(var);
            // SAFETY: the task declared these accesses; the parts were written before the barrier
            // that lies between.
            unsafe {
                let sums = cx.workspace::<A>(self.sums);
                let out = cx.get_mut::<C>(var, own.clone());
                for (out, column) in out.iter_mut().zip(own.clone()) {
                    let mut sum = if adds { out.load() } else { A::ZERO };
                    for part in 0..NORM_PARTS {
                        sum += *sums.add((part * self.vectors.len() + index) * width + column);
                    }
                    *out = C::store(sum);
                }
            }
        }
    }
}
