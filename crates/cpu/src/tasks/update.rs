//! Optimizer updates over flat units.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::DType;
use phalanx_ir::ops::{self, AdamW, Sgd};

use super::{Access, Context, Operation, Share, Task, Tasks, Var};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::optim::{Adam, DecayKind, SgdStep, UpdatedWeights};

pub(super) fn compile(op: &Operation<'_>, rule: Rule) -> Result<Tasks, EngineError> {
    // Besides w, g, lr, step and clip.
    let states = op.instr.inputs.len() - 5;
    let narrow = op.instr.outputs.len() > 1 + states;
    let vars = Vars {
        w: op.input(0),
        g: op.input(1),
        states: (0..states).map(|i| op.input(2 + i)).collect(),
        scalars: std::array::from_fn(|i| op.input(2 + states + i)),
        out: op.output(0),
        state_outs: (0..states).map(|i| op.output(1 + i)).collect(),
        copy: narrow.then(|| op.output(1 + states)),
    };
    let first = op.first_element(op.instr.inputs[0])?;
    let copy = vars.copy.as_ref().map_or(vars.w.dtype, |v| v.dtype);
    let types = (vars.w.dtype, vars.g.dtype, copy);
    macro_rules! task {
        ($A:ty, $G:ty, $C:ty) => {
            Box::new(Update::<$A, $G, $C> { rule, first, vars, types: PhantomData })
        };
    }
    use DType::{Bf16, F32, F64};
    use half::bf16;
    let task: Box<dyn Task> = match types {
        (F32, F32, F32) => task!(f32, f32, f32),
        (F32, F32, Bf16) => task!(f32, f32, bf16),
        (F32, Bf16, F32) => task!(f32, bf16, f32),
        (F32, Bf16, Bf16) => task!(f32, bf16, bf16),
        (F64, F64, F64) => task!(f64, f64, f64),
        (w, g, c) => return Err(op.unsupported(format!("no kernel for {w}, {g}, {c}"))),
    };
    Ok(vec![task])
}

/// The update, with its constants.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    AdamW(AdamW),
    Sgd(Sgd),
}

impl Rule {
    fn decay(&self) -> ops::Decay {
        match self {
            Rule::AdamW(adamw) => adamw.decay,
            Rule::Sgd(sgd) => sgd.decay,
        }
    }
}

struct Vars {
    w: Var,
    g: Var,
    states: Vec<Var>,
    /// lr, step, clip.
    scalars: [Var; 3],
    out: Var,
    state_outs: Vec<Var>,
    copy: Option<Var>,
}

struct Update<A, G, C> {
    rule: Rule,
    /// The number in the whole unit of the first element that this rank holds.
    first: usize,
    vars: Vars,
    types: PhantomData<(A, G, C)>,
}

impl<A, G, C> Task for Update<A, G, C>
where
    A: CpuFloat,
    G: CpuElement<Acc = A>,
    C: CpuElement<Acc = A>,
{
    fn accesses(&self, share: Share) -> Vec<Access> {
        let v = &self.vars;
        let own = share.of(v.w.elements());
        let mut accesses = vec![v.w.reads(own.clone()), v.g.reads(own.clone())];
        accesses.extend(v.states.iter().map(|s| s.reads(own.clone())));
        accesses.extend(v.scalars.iter().map(Var::reads_all));
        let written = [&v.out].into_iter().chain(&v.state_outs).chain(&v.copy);
        accesses.extend(written.map(|s| s.writes(own.clone())));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let v = &self.vars;
        let own = cx.share.of(v.w.elements());
        // Updates work in place: state is first copied to the results, unless a script binds both
        // to one buffer.
        self.bring(cx, &v.w, &v.out, &own);
        for (from, to) in v.states.iter().zip(&v.state_outs) {
            self.bring(cx, from, to, &own);
        }
        let mut at = own.start;
        while at < own.end {
            // Elements that decay and those that do not are updated separately.
            let (rate, same) = self.rule.decay().at(self.first + at);
            let end = own.end.min(at.saturating_add(same));
            self.piece(cx, at..end, rate);
            at = end;
        }
    }
}

impl<A, G, C> Update<A, G, C>
where
    A: CpuFloat,
    G: CpuElement<Acc = A>,
    C: CpuElement<Acc = A>,
{
    /// Updates elements that all decay at this rate.
    fn piece(&self, cx: &Context<'_>, own: Range<usize>, rate: f64) {
        let v = &self.vars;
        // SAFETY: the task declared these accesses; results are distinct, and the operands that
        // share their memory are not read through other references.
        unsafe {
            let [lr, step, clip] = std::array::from_fn(|i| cx.scalar(&v.scalars[i]));
            let grad = cx.get::<G>(&v.g, own.clone());
            let weights = UpdatedWeights {
                master: cx.get_mut::<A>(&v.out, own.clone()),
                copy: v.copy.as_ref().map(|c| cx.get_mut::<C>(c, own.clone())),
            };
            let state = |i: usize| cx.get_mut::<A>(&v.state_outs[i], own.clone());
            match self.rule {
                Rule::AdamW(a) => Adam {
                    lr,
                    betas: [a.beta1, a.beta2],
                    eps: a.eps,
                    weight_decay: rate,
                    decay: DecayKind::Decoupled,
                    step: step as u64,
                    clip,
                }
                .update(grad, state(0), state(1), weights),
                Rule::Sgd(s) => SgdStep {
                    lr,
                    momentum: s.momentum,
                    nesterov: s.nesterov,
                    weight_decay: rate,
                    decay: DecayKind::L2,
                    clip,
                }
                .update(grad, state(0), weights),
            }
        }
    }

    fn bring(&self, cx: &Context<'_>, from: &Var, to: &Var, own: &Range<usize>) {
        let (source, target) = (cx.ptr::<A>(from), cx.ptr::<A>(to));
        if source != target {
            // SAFETY: both hold the unit's elements, and `copy` allows them to overlap.
            unsafe {
                std::ptr::copy(source.add(own.start), target.add(own.start), own.len());
            }
        }
    }
}
