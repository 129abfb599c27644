//! Members of a packed unit: a sum of squares for each, or a factor.
//!
//! A rank holds some part of a unit, and where members lie in it is found once, at compile time.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::ops::Bounds;

use super::extent::common;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::elementwise;
use crate::kernels::reduce::sum_of_squares;

pub(super) fn squares(op: &Operation<'_>, bounds: &Bounds) -> Result<Tasks, EngineError> {
    let (x, out) = (op.input(0), op.output(0));
    let mut runs = vec![Vec::new(); out.elements()];
    for piece in pieces(op, bounds, x.valid[0])? {
        if let Some(member) = piece.member {
            runs[member].push(piece.elements);
        }
    }
    Ok(vec![for_float!(op, x.dtype, T => task(Squares::<T> { runs, x, out, types: PhantomData }))?])
}

pub(super) fn scale(op: &Operation<'_>, bounds: &Bounds) -> Result<Tasks, EngineError> {
    let (x, factors, out) = (op.input(0), op.input(1), op.output(0));
    // Padding is written too, as by every op that works on elements.
    let pieces = pieces(op, bounds, x.elements())?;
    let made = for_float!(op, x.dtype, T => {
        task(Scale::<T> { pieces, x, factors, out, types: PhantomData })
    })?;
    Ok(vec![made])
}

/// Neighbouring elements of a rank that belong to one member, or to none.
struct Piece {
    elements: Range<usize>,
    member: Option<usize>,
}

/// The pieces of the first elements that this rank holds of the first operand.
fn pieces(op: &Operation<'_>, bounds: &Bounds, count: usize) -> Result<Vec<Piece>, EngineError> {
    let first = op.first_element(op.instr.inputs[0])?;
    let (mut found, mut at) = (Vec::new(), 0);
    while at < count {
        let (member, same) = bounds.at(first + at);
        let end = count.min(at + same);
        found.push(Piece { elements: at..end, member });
        at = end;
    }
    Ok(found)
}

/// A sum for each member. One worker sums all of it, so the result does not depend on how many there
/// are; neighbours, which are often of one size, have different workers.
struct Squares<T> {
    /// For each element of the result: what it is the sum of. Padding has no elements to sum.
    runs: Vec<Vec<Range<usize>>>,
    x: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T> Squares<T> {
    fn own(&self, share: Share) -> impl Iterator<Item = (usize, &Vec<Range<usize>>)> {
        self.runs.iter().enumerate().skip(share.worker).step_by(share.workers)
    }
}

impl<T: CpuElement> Task for Squares<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let of_one = |(member, runs): (usize, &Vec<Range<usize>>)| {
            let mut accesses = vec![self.out.writes(member..member + 1)];
            accesses.extend(runs.iter().map(|run| self.x.reads(run.clone())));
            accesses
        };
        self.own(share).flat_map(of_one).collect()
    }

    fn run(&self, cx: &Context<'_>) {
        let adds = cx.adds(&self.out);
        for (member, runs) in self.own(cx.share) {
            // SAFETY: the task declared these accesses; the result lies over no operand.
            unsafe {
                let of_run = |run: &Range<usize>| sum_of_squares(cx.get::<T>(&self.x, run.clone()));
                let sum: f64 = runs.iter().map(of_run).sum();
                let out = &mut cx.get_mut::<T::Acc>(&self.out, member..member + 1)[0];
                let old = if adds { *out } else { T::Acc::ZERO };
                *out = old + T::Acc::from_f64(sum);
            }
        }
    }
}

/// Each element by the factor of its member.
struct Scale<T> {
    pieces: Vec<Piece>,
    x: Var,
    factors: Var,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Scale<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.of(self.x.elements());
        vec![self.x.reads(own.clone()), self.factors.reads_all(), self.out.writes(own)]
    }

    fn run(&self, cx: &Context<'_>) {
        let own = cx.share.of(self.x.elements());
        let in_place = cx.ptr::<T>(&self.x) == cx.ptr::<T>(&self.out);
        for piece in &self.pieces {
            let elements = common(&piece.elements, &own);
            // SAFETY: the task declared these accesses; where the result lies over the operand, that is
            // not read through another reference.
            unsafe {
                let factor = piece.member.map(|m| cx.get::<T::Acc>(&self.factors, m..m + 1)[0]);
                let out = cx.get_mut::<T>(&self.out, elements.clone());
                match (factor, in_place) {
                    (Some(factor), true) => elementwise::scale_in_place(out, factor),
                    (None, true) => {}
                    (Some(factor), false) => {
                        elementwise::scale(cx.get::<T>(&self.x, elements), factor, out);
                    }
                    (None, false) => out.copy_from_slice(cx.get::<T>(&self.x, elements)),
                }
            }
        }
    }
}
