//! Pooling and its gradients: workers share lines of the result.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::Op;
use phalanx_ir::ops::PoolKind;

use super::conv::gathered;
use super::halo;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, for_float, task};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::patches::Patches;

pub(super) fn compile(op: &Operation<'_>) -> Result<Tasks, EngineError> {
    let (mut tasks, operands) = halo::compile(op)?;
    let (from, out) = (operands[0].clone(), op.output(0));
    let [x, y] = [op.instr.inputs[0], op.instr.outputs[0]];
    let made = match &op.instr.op {
        Op::Pooling(pool) => {
            let patches = gathered(op, &pool.window, [x, y], false, &from)?;
            let taken = (pool.kind == PoolKind::Max).then(|| op.output(1));
            for_float!(op, from.dtype, T => {
                task(Pooling::<T> { patches, from, taken, out, types: PhantomData })
            })
        }
        Op::PoolingGrad(pool) => {
            let patches = gathered(op, &pool.of.window, [y, x], true, &from)?;
            let taken = (pool.of.kind == PoolKind::Max).then(|| operands[1].clone());
            for_float!(op, from.dtype, T => {
                task(PoolingGrad::<T> { patches, dy: from, taken, out, types: PhantomData })
            })
        }
        _ => return Err(op.unsupported("it is no pooling")),
    }?;
    tasks.push(made);
    Ok(tasks)
}

/// A worker's places of a result (all dims but the channels).
fn own(out: &Var, share: Share) -> Range<usize> {
    let lines = share.of(out.shape[0] * out.shape[1]);
    lines.start * out.shape[2]..lines.end * out.shape[2]
}

/// The image, line and column of a place, unless it is padding.
fn position(out: &Var, place: usize) -> Option<[usize; 3]> {
    let (line, column) = (place / out.shape[2], place % out.shape[2]);
    let at = [line / out.shape[1], line % out.shape[1], column];
    at.iter().zip(&out.valid).all(|(at, valid)| at < valid).then_some(at)
}

/// The taps of a place that are not missing, with the places that they read.
fn taps(p: &Patches, height: usize, at: [usize; 3]) -> impl Iterator<Item = (usize, usize)> {
    let (p, [image, line, column], across) = (*p, at, p.spans[1].size);
    (0..p.spans[0].size * across).filter_map(move |tap| {
        let row = p.read(0, line, tap / across)?;
        let place = p.read(1, column, tap % across)?;
        Some((tap, (image * height + row) * p.line + place))
    })
}

/// What each tap of a window counts in its mean.
fn mean_share<T: CpuElement>(p: &Patches) -> T::Acc {
    T::Acc::ONE / T::Acc::from_f64((p.spans[0].size * p.spans[1].size) as f64)
}

struct Pooling<T> {
    patches: Patches,
    from: Var,
    /// Where the taps of maxima are written.
    taken: Option<Var>,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for Pooling<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.out.of_rows(&own(&self.out, share));
        let mut accesses = vec![self.from.reads_all(), self.out.writes(own.clone())];
        accesses.extend(self.taken.as_ref().map(|taken| taken.writes(own)));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let (width, valid) = (self.out.width(), self.out.valid_width());
        let share = mean_share::<T>(&self.patches);
        for place in own(&self.out, cx.share) {
            let elements = place * width..(place + 1) * width;
            // SAFETY: the task declared these accesses.
            let (from, out, mut taken) = unsafe {
                (
                    cx.get::<T>(&self.from, 0..self.from.elements()),
                    cx.get_mut::<T>(&self.out, elements.clone()),
                    self.taken.as_ref().map(|taken| cx.get_mut::<i32>(taken, elements)),
                )
            };
            out.fill(T::default());
            if let Some(taken) = &mut taken {
                taken.fill(0);
            }
            let Some(at) = position(&self.out, place) else { continue };
            for channel in 0..valid {
                let values = taps(&self.patches, self.from.shape[1], at)
                    .map(|(tap, place)| (tap, from[place * width + channel]));
                match &mut taken {
                    None => {
                        let sum = values.fold(T::Acc::ZERO, |sum, (_, v)| sum + v.load());
                        out[channel] = T::store(sum * share);
                    }
                    Some(taken) => {
                        let (value, tap) = largest(values);
                        (out[channel], taken[channel]) = (value, tap);
                    }
                }
            }
        }
    }
}

/// The first of the largest values with its tap; a NaN is larger than all.
fn largest<T: CpuElement>(values: impl Iterator<Item = (usize, T)>) -> (T, i32) {
    let mut found = (T::store(T::Acc::NEG_INFINITY), -1);
    for (tap, value) in values {
        let (new, old) = (value.load(), found.0.load());
        let is_nan = new.partial_cmp(&new).is_none();
        if found.1 < 0 || new > old || is_nan {
            found = (value, tap as i32);
        }
    }
    found
}

struct PoolingGrad<T> {
    patches: Patches,
    dy: Var,
    /// The taps of maxima.
    taken: Option<Var>,
    out: Var,
    types: PhantomData<T>,
}

impl<T: CpuElement> Task for PoolingGrad<T> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = self.out.of_rows(&own(&self.out, share));
        let mut accesses = vec![self.dy.reads_all(), self.out.writes(own)];
        accesses.extend(self.taken.as_ref().map(Var::reads_all));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let (width, valid) = (self.out.width(), self.out.valid_width());
        let share = mean_share::<T>(&self.patches);
        for place in own(&self.out, cx.share) {
            // SAFETY: the task declared these accesses.
            let (dy, taken, out) = unsafe {
                (
                    cx.get::<T>(&self.dy, 0..self.dy.elements()),
                    self.taken.as_ref().map(|taken| cx.get::<i32>(taken, 0..taken.elements())),
                    cx.get_mut::<T>(&self.out, place * width..(place + 1) * width),
                )
            };
            out.fill(T::default());
            let Some(at) = position(&self.out, place) else { continue };
            for (channel, out) in out[..valid].iter_mut().enumerate() {
                let values = taps(&self.patches, self.dy.shape[1], at)
                    .map(|(tap, place)| (tap, place * width + channel));
                *out = T::store(match taken {
                    None => values.fold(T::Acc::ZERO, |sum, (_, at)| sum + dy[at].load()) * share,
                    Some(taken) => values
                        .filter(|&(tap, at)| taken[at] == tap as i32)
                        .fold(T::Acc::ZERO, |sum, (_, at)| sum + dy[at].load()),
                });
            }
        }
    }
}
