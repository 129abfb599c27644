//! Sums and maxima.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::ReduceKind;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::reduce;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let (kind, dims) = match &op.instr.op {
        Op::SumSquares(_) => (Kind::Squares, (0..x.shape.len()).collect()),
        Op::Reduce(r) => (Kind::Reduce(r.kind), r.dims.clone()),
        _ => return Err(op.unsupported("it is not a reduction")),
    };
    let owner = op.instr.outputs[0].index();
    let made = for_floats!(op, x.dtype, out.dtype, T, C => {
        match kind {
            _ if dims.iter().any(|&d| x.valid[d] < x.shape[d]) => {
                task(Scattered::<T, C>::new(kind, &dims, x, out))
            }
            Kind::Reduce(reduce) if dims.len() < x.shape.len() => {
                match blocks(&x.shape, &dims) {
                    Some(blocks) => {
                        task(Partly::<T, C> { op: reduce, blocks, x, out, types: PhantomData })
                    }
                    None => task(Scattered::<T, C>::new(kind, &dims, x, out)),
                }
            }
            _ => task(Total::<T, C> { owner, kind, x, out, types: PhantomData }),
        }
    })?;
    Ok(vec![made])
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reduce(ReduceKind),
    Squares,
}

/// A reduction to one number, by one worker: the result does not depend on how many there are.
/// Neighbouring instructions have different owners, so the norms of many units run in parallel.
struct Total<T, C> {
    owner: usize,
    kind: Kind,
    x: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for Total<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let n = if self.owner % share.workers == share.worker { usize::MAX } else { 0 };
        vec![self.x.reads(0..self.x.elements().min(n)), self.out.writes(0..n.min(1))]
    }

    fn run(&self, cx: &Context<'_>) {
        if self.owner % cx.share.workers != cx.share.worker {
            return;
        }
        // SAFETY: the task declared these accesses.
        let (x, out) = unsafe {
            (cx.get::<T>(&self.x, 0..self.x.elements()), cx.get_mut::<C>(&self.out, 0..1))
        };
        let value = match self.kind {
            Kind::Reduce(ReduceKind::Sum) => reduce::sum(x),
            Kind::Squares => reduce::sum_of_squares(x),
            Kind::Reduce(ReduceKind::Max) => {
                x.iter().fold(f64::NEG_INFINITY, |m, v| m.max(v.load().to_f64()))
            }
        };
        let old = if cx.adds(&self.out) { out[0].load() } else { T::Acc::ZERO };
        out[0] = C::store(old + T::Acc::from_f64(value));
    }
}

/// A reduction over some dims; elements of the result are shared.
struct Partly<T, C> {
    op: ReduceKind,
    /// Dims of the operand before, among and after those reduced.
    blocks: [usize; 3],
    x: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Partly<T, C> {
    /// Whole outer indices if there are several, else columns of the one.
    fn own(&self, share: Share) -> Range<usize> {
        let [outer, _, inner] = self.blocks;
        match outer {
            1 => share.of(inner),
            _ => {
                let own = share.of(outer);
                own.start * inner..own.end * inner
            }
        }
    }
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for Partly<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        let [outer, middle, _] = self.blocks;
        let read = match outer {
            _ if own.is_empty() => 0..0,
            1 => 0..self.x.elements(),
            _ => own.start * middle..own.end * middle,
        };
        vec![self.x.reads(read), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        if own.is_empty() {
            return;
        }
        let adds = cx.adds(&self.out);
        let [outer, middle, inner] = self.blocks;
        // SAFETY: the task declared these accesses.
        unsafe {
            let out = cx.get_mut::<C>(&self.out, own.clone());
            if outer == 1 {
                let x = cx.get::<T>(&self.x, 0..self.x.elements());
                return reduce::reduce_leading(self.op, x, inner, own, adds, out);
            }
            let x = cx.get::<T>(&self.x, own.start * middle..own.end * middle);
            match inner {
                1 => reduce::reduce_trailing(self.op, x, middle, adds, out),
                _ => reduce::reduce_middle(self.op, x, middle, inner, adds, out),
            }
        }
    }
}

/// Dims before, among and after those reduced, if these are neighbours.
fn blocks(shape: &[usize], dims: &[usize]) -> Option<[usize; 3]> {
    let (first, last) = (*dims.first()?, *dims.last()?);
    let product = |r: Range<usize>| shape[r].iter().product::<usize>();
    (last - first + 1 == dims.len())
        .then(|| [product(0..first), product(first..last + 1), product(last + 1..shape.len())])
}

/// A reduction over dims that are padded or not neighbours: each result walks over its own
/// elements.
struct Scattered<T, C> {
    kind: Kind,
    /// Size and stride in the operand of every dim that stays, and of every reduced dim, where only
    /// valid elements count.
    kept: Vec<(usize, usize)>,
    reduced: Vec<(usize, usize)>,
    x: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Scattered<T, C> {
    fn new(kind: Kind, dims: &[usize], x: Var, out: Var) -> Self {
        let walk = |gone: bool| -> Vec<(usize, usize)> {
            let steps = if gone { &x.valid } else { &x.shape };
            (0..x.shape.len())
                .filter(|d| dims.contains(d) == gone)
                .map(|d| (steps[d], x.shape[d + 1..].iter().product()))
                .collect()
        };
        Self { kind, kept: walk(false), reduced: walk(true), x, out, types: PhantomData }
    }

    fn one(&self, x: &[T], index: usize) -> f64 {
        let first = place(&self.kept, index);
        let count: usize = self.reduced.iter().map(|(n, _)| n).product();
        let values = (0..count).map(|i| x[first + place(&self.reduced, i)].load().to_f64());
        match self.kind {
            Kind::Reduce(ReduceKind::Sum) => values.sum(),
            Kind::Squares => values.map(|v| v * v).sum(),
            Kind::Reduce(ReduceKind::Max) => {
                values.fold(f64::NEG_INFINITY, |m, v| if v > m || v.is_nan() { v } else { m })
            }
        }
    }
}

/// The operand's index of number `index` of a walk over dims, the last one fastest.
fn place(dims: &[(usize, usize)], index: usize) -> usize {
    let mut rest = index;
    let mut at = 0;
    for &(n, stride) in dims.iter().rev() {
        at += rest % n * stride;
        rest /= n;
    }
    at
}

impl<T: CpuElement, C: CpuElement<Acc = T::Acc>> Task for Scattered<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        vec![self.x.reads_all(), self.out.writes(share.of(self.out.elements()))]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.out.elements());
        let adds = cx.adds(&self.out);
        // SAFETY: the task declared these accesses.
        let (x, out) = unsafe {
            let x = cx.get::<T>(&self.x, 0..self.x.elements());
            (x, cx.get_mut::<C>(&self.out, own.clone()))
        };
        for (out, index) in out.iter_mut().zip(own) {
            let old = if adds { out.load() } else { T::Acc::ZERO };
            *out = C::store(old + T::Acc::from_f64(self.one(x, index)));
        }
    }
}
