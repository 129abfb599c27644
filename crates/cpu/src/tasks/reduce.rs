//! Sums and maxima.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::ReduceKind;

use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_floats, task};
use crate::element::{Element, Float};
use crate::kernels::reduce;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let (kind, dims) = match &op.instr.op {
        Op::SumSquares(_) => (Kind::Squares, (0..x.shape.len()).collect()),
        Op::Reduce(r) if r.kind == ReduceKind::Sum => (Kind::Sum, r.dims.clone()),
        Op::Reduce(r) => (Kind::Max, r.dims.clone()),
        _ => return Err(op.unsupported("it is no reduction")),
    };
    let whole = dims.len() == x.shape.len();
    let owner = op.instr.outputs[0].index();
    let made = for_floats!(op, x.dtype, out.dtype, T, C => {
        if whole {
            task(Total::<T, C> { owner, kind, x, out, types: PhantomData })
        } else {
            task(Partly::<T, C> { kind, dims, x, out, types: PhantomData })
        }
    })?;
    Ok(vec![made])
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sum,
    Max,
    Squares,
}

/// A reduction to one number, by one worker: the result does not depend on how many there are.
/// Neighbouring instructions have different owners, so the norms of many units run side by side.
struct Total<T, C> {
    owner: usize,
    kind: Kind,
    x: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: Element, C: Element<Acc = T::Acc>> Task for Total<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let n = if self.owner % share.workers == share.worker {
            usize::MAX
        } else {
            0
        };
        vec![
            self.x.reads(0..self.x.elements().min(n)),
            self.out.writes(0..n.min(1)),
        ]
    }

    fn run(&self, cx: &Context<'_>) {
        if self.owner % cx.share.workers != cx.share.worker {
            return;
        }
        // SAFETY: the task declared these accesses.
        let (x, out) = unsafe {
            (
                cx.get::<T>(&self.x, 0..self.x.elements()),
                cx.get_mut::<C>(&self.out, 0..1),
            )
        };
        let value = match self.kind {
            Kind::Sum => reduce::sum(x),
            Kind::Squares => reduce::sum_of_squares(x),
            Kind::Max => x
                .iter()
                .fold(f64::NEG_INFINITY, |m, v| m.max(v.load().to_f64())),
        };
        let old = if cx.adds(&self.out) {
            out[0].load()
        } else {
            T::Acc::ZERO
        };
        out[0] = C::store(old + T::Acc::from_f64(value));
    }
}

/// A reduction over some dims: one result at a time, columns of the result shared.
struct Partly<T, C> {
    kind: Kind,
    dims: Vec<usize>,
    x: Var,
    out: Var,
    types: PhantomData<(T, C)>,
}

impl<T: Element, C: Element<Acc = T::Acc>> Partly<T, C> {
    /// Dims of the operand before, among and after those reduced, if these are neighbours.
    fn blocks(&self) -> Option<[usize; 3]> {
        let (first, last) = (*self.dims.first()?, *self.dims.last()?);
        let together = last - first + 1 == self.dims.len();
        let product = |r: Range<usize>| self.x.shape[r].iter().product::<usize>();
        together.then(|| {
            [
                product(0..first),
                product(first..last + 1),
                product(last + 1..self.x.shape.len()),
            ]
        })
    }

    fn own(&self, share: Share) -> Range<usize> {
        share.of(self.out.elements())
    }

    /// The operand's index of the first element that result `index` is made of, and the walk over
    /// the rest: (extent, stride) of each reduced dim.
    fn walk(&self, index: usize) -> (usize, Vec<(usize, usize)>) {
        let shape = &self.x.shape;
        let stride = |dim: usize| shape[dim + 1..].iter().product::<usize>();
        let mut rest = index;
        let mut at = 0;
        for dim in (0..shape.len()).rev().filter(|d| !self.dims.contains(d)) {
            at += rest % shape[dim] * stride(dim);
            rest /= shape[dim];
        }
        (
            at,
            self.dims.iter().map(|&d| (shape[d], stride(d))).collect(),
        )
    }

    fn one(&self, x: &[T], index: usize) -> T::Acc {
        let (start, dims) = self.walk(index);
        let count: usize = dims.iter().map(|(n, _)| n).product();
        let mut sum = 0.0;
        let mut max = f64::NEG_INFINITY;
        for i in 0..count {
            let mut rest = i;
            let mut at = start;
            for (n, stride) in dims.iter().rev() {
                at += rest % n * stride;
                rest /= n;
            }
            let value = x[at].load().to_f64();
            sum += value;
            max = max.max(value);
        }
        T::Acc::from_f64(if self.kind == Kind::Max { max } else { sum })
    }
}

/// Whether two element types are one.
fn same<T: Element, C: Element>() -> bool {
    T::DTYPE == C::DTYPE
}

impl<T: Element, C: Element<Acc = T::Acc>> Task for Partly<T, C> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.own(share);
        let reads = match self.blocks() {
            _ if own.is_empty() => 0..0,
            // Trailing dims: a share of the results is a share of the rows.
            Some([_, n, 1]) => own.start * n..own.end * n,
            _ => 0..self.x.elements(),
        };
        vec![self.x.reads(reads), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = self.own(cx.share);
        if own.is_empty() {
            return;
        }
        let adds = cx.adds(&self.out);
        let op = if self.kind == Kind::Max {
            ReduceKind::Max
        } else {
            ReduceKind::Sum
        };
        // SAFETY: the task declared these accesses; where the types are equal, so are the slices.
        unsafe {
            match self.blocks() {
                Some([_, n, 1]) if same::<T, C>() && !adds => {
                    let x = cx.get::<T>(&self.x, own.start * n..own.end * n);
                    reduce::reduce_trailing(op, x, n, cx.get_mut::<T>(&self.out, own));
                }
                Some([1, _, inner]) if same::<T, C>() && !adds => {
                    let x = cx.get::<T>(&self.x, 0..self.x.elements());
                    let out = cx.get_mut::<T>(&self.out, own.clone());
                    reduce::reduce_leading(op, x, inner, own, out);
                }
                _ => {
                    let x = cx.get::<T>(&self.x, 0..self.x.elements());
                    let out = cx.get_mut::<C>(&self.out, own.clone());
                    for (out, index) in out.iter_mut().zip(own) {
                        let old = if adds { out.load() } else { T::Acc::ZERO };
                        *out = C::store(old + self.one(x, index));
                    }
                }
            }
        }
    }
}
