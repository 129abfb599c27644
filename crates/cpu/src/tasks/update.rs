//! Optimizer updates over flat units.

use std::marker::PhantomData;
use std::ops::Range;

use phalanx_engine::EngineError;
use phalanx_ir::DType;
use phalanx_ir::ops::{self, AdamW, LambDirection, Lion, Narrow, Sgd};

use super::{Access, Context, Operation, Share, Task, Tasks, Var};
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::halves;
use crate::kernels::optim::{Adam, DecayKind, LambStep, LionStep, SgdStep, UpdatedWeights};

pub(super) fn compile(op: &Operation<'_>, rule: Rule) -> Result<Tasks, EngineError> {
    let states = rule.states();
    let (split, copied) = match rule.narrow() {
        Narrow::None => (0, false),
        Narrow::Copy(_) => (0, true),
        Narrow::Split => (1, false),
    };
    // After w, g, lower halves, the states, lr, step and clip.
    let scalars = 2 + split + states;
    let go = (op.instr.inputs.len() > 3 + scalars).then(|| op.input(3 + scalars));
    let vars = Vars {
        w: op.input(0),
        g: op.input(1),
        states: (0..states).map(|i| op.input(2 + split + i)).collect(),
        scalars: std::array::from_fn(|i| op.input(scalars + i)),
        go,
        out: op.output(0),
        state_outs: (0..states).map(|i| op.output(1 + split + i)).collect(),
        copy: copied.then(|| op.output(1 + states)),
    };
    let first = op.first_element(op.instr.inputs[0])?;
    let copy = vars.copy.as_ref().map_or(vars.w.dtype, |v| v.dtype);
    let types = (vars.w.dtype, vars.g.dtype, copy);
    macro_rules! task {
        ($A:ty, $G:ty, $C:ty) => {
            Box::new(Update::<$A, $G, $C> { rule, first, vars, types: PhantomData })
        };
    }
    macro_rules! task_of_halves {
        ($G:ty) => {{
            let of = Update::<f32, $G, f32> { rule, first, vars, types: PhantomData };
            Box::new(SplitUpdate { of, lower: op.input(2), lower_out: op.output(1) })
        }};
    }
    use DType::{Bf16, F16, F32, F64};
    use half::{bf16, f16};
    let task: Box<dyn Task> = match types {
        (Bf16, F32, _) if split == 1 => task_of_halves!(f32),
        (Bf16, Bf16, _) if split == 1 => task_of_halves!(bf16),
        (F32, F32, F32) => task!(f32, f32, f32),
        (F32, F32, Bf16) => task!(f32, f32, bf16),
        (F32, Bf16, F32) => task!(f32, bf16, f32),
        (F32, Bf16, Bf16) => task!(f32, bf16, bf16),
        (F32, F32, F16) => task!(f32, f32, f16),
        (F32, Bf16, F16) => task!(f32, bf16, f16),
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
    Lion(Lion),
    Lamb(LambDirection),
}

impl Rule {
    fn states(&self) -> usize {
        match self {
            Rule::AdamW(_) | Rule::Lamb(_) => 2,
            Rule::Sgd(_) | Rule::Lion(_) => 1,
        }
    }

    fn decay(&self) -> ops::Decay {
        match self {
            Rule::AdamW(adamw) => adamw.decay,
            Rule::Sgd(sgd) => sgd.decay,
            Rule::Lion(lion) => lion.decay,
            Rule::Lamb(lamb) => lamb.decay,
        }
    }

    fn narrow(&self) -> Narrow {
        match self {
            Rule::AdamW(adamw) => adamw.narrow,
            Rule::Sgd(sgd) => sgd.narrow,
            Rule::Lion(lion) => lion.narrow,
            Rule::Lamb(_) => Narrow::None,
        }
    }

    /// Whether the first result is the weights, and not a direction for them.
    fn moves(&self) -> bool {
        !matches!(self, Rule::Lamb(_))
    }
}

struct Vars {
    w: Var,
    g: Var,
    states: Vec<Var>,
    /// lr, step, clip.
    scalars: [Var; 3],
    /// Where it is 0, nothing changes.
    go: Option<Var>,
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
        accesses.extend(v.scalars.iter().chain(&v.go).map(Var::reads_all));
        let written = [&v.out].into_iter().chain(&v.state_outs).chain(&v.copy);
        accesses.extend(written.map(|s| s.writes(own.clone())));
        accesses
    }

    fn run(&self, cx: &Context<'_>) {
        let v = &self.vars;
        let own = cx.share.of(v.w.elements());
        // Updates work in place: state is first copied to the results, unless a script binds both
        // to one buffer.
        if self.rule.moves() {
            self.bring(cx, &v.w, &v.out, &own);
        }
        self.bring_states(cx, &own);
        if self.stops(cx) {
            return self.leave(cx, own);
        }
        for (piece, rate) in self.pieces(own, usize::MAX) {
            // SAFETY: the task declared these accesses; results are distinct, and the operands that
            // share their memory are not read through other references.
            let weights = unsafe {
                UpdatedWeights {
                    master: cx.get_mut::<A>(&v.out, piece.clone()),
                    copy: v.copy.as_ref().map(|c| cx.get_mut::<C>(c, piece.clone())),
                }
            };
            self.piece(cx, piece, rate, weights);
        }
    }
}

/// The update of masters whose upper halves are the weights.
struct SplitUpdate<G> {
    of: Update<f32, G, f32>,
    lower: Var,
    lower_out: Var,
}

impl<G: CpuElement<Acc = f32>> Task for SplitUpdate<G> {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let own = share.of(self.lower.elements());
        let mut accesses = self.of.accesses(share);
        accesses.extend([self.lower.reads(own.clone()), self.lower_out.writes(own)]);
        accesses
    }

    /// Block by block, so that masters stay in the first-level cache.
    fn run(&self, cx: &Context<'_>) {
        let v = &self.of.vars;
        let own = cx.share.of(v.w.elements());
        self.of.bring_states(cx, &own);
        let stops = self.of.stops(cx);
        let mut block = [0.0; BLOCK];
        for (piece, rate) in self.of.pieces(own, BLOCK) {
            let master = &mut block[..piece.len()];
            // SAFETY: the task declared these accesses, and halves are numbers of 16 bits. Operands, which
            // results may share their memory with, are read before those are written.
            unsafe {
                let upper = cx.get::<u16>(&v.w, piece.clone());
                halves::join(upper, cx.get::<u16>(&self.lower, piece.clone()), master);
            }
            if !stops {
                let weights = UpdatedWeights { master: &mut *master, copy: None };
                self.of.piece(cx, piece.clone(), rate, weights);
            }
            // SAFETY: as above.
            unsafe {
                let upper = cx.get_mut::<u16>(&v.out, piece.clone());
                halves::split(master, upper, cx.get_mut::<u16>(&self.lower_out, piece));
            }
        }
    }
}

/// Masters that are joined at a time.
const BLOCK: usize = 1024;

impl<A, G, C> Update<A, G, C>
where
    A: CpuFloat,
    G: CpuElement<Acc = A>,
    C: CpuElement<Acc = A>,
{
    /// Pieces of at most so many elements, each with the decay of all of them.
    fn pieces(&self, own: Range<usize>, most: usize) -> impl Iterator<Item = (Range<usize>, f64)> {
        let (decay, first, mut at) = (self.rule.decay(), self.first, own.start);
        std::iter::from_fn(move || {
            let (rate, same) = decay.at(first + at);
            let piece = at..own.end.min(at.saturating_add(same.min(most)));
            at = piece.end;
            (!piece.is_empty()).then_some((piece, rate))
        })
    }

    /// Whether the step changes nothing.
    fn stops(&self, cx: &Context<'_>) -> bool {
        // SAFETY: the task declared that it reads the scalar, which no result overlaps.
        self.vars.go.as_ref().is_some_and(|go| unsafe { cx.scalar(go) } == 0.0)
    }

    /// Updates elements that all decay at this rate.
    fn piece(
        &self,
        cx: &Context<'_>,
        own: Range<usize>,
        rate: f64,
        weights: UpdatedWeights<'_, A, C>,
    ) {
        let v = &self.vars;
        // SAFETY: as where the weights come from.
        unsafe {
            let [lr, step, clip] = std::array::from_fn(|i| cx.scalar(&v.scalars[i]));
            let grad = cx.get::<G>(&v.g, own.clone());
            let state = |i: usize| cx.get_mut::<A>(&v.state_outs[i], own.clone());
            match self.rule {
                Rule::Lamb(l) => LambStep {
                    betas: [l.beta1, l.beta2],
                    eps: l.eps,
                    weight_decay: rate,
                    step: step as u64,
                    clip,
                }
                .direction(
                    grad,
                    [state(0), state(1)],
                    cx.get::<A>(&v.w, own.clone()),
                    weights.master,
                ),
                Rule::AdamW(a) => Adam {
                    lr,
                    betas: [a.beta1, a.beta2],
                    eps: a.eps,
                    weight_decay: rate,
                    decay: if a.coupled { DecayKind::L2 } else { DecayKind::Decoupled },
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
                Rule::Lion(l) => {
                    LionStep { lr, betas: [l.beta1, l.beta2], weight_decay: rate, clip }.update(
                        grad,
                        state(0),
                        weights,
                    )
                }
            }
        }
    }

    /// Gives weights and state as they were, and a direction of zero.
    fn leave(&self, cx: &Context<'_>, own: Range<usize>) {
        let v = &self.vars;
        // SAFETY: the task declared that it writes these results, which are distinct.
        unsafe {
            let out = cx.get_mut::<A>(&v.out, own.clone());
            if !self.rule.moves() {
                out.fill(A::ZERO);
            }
            if let Some(copy) = &v.copy {
                let copy = cx.get_mut::<C>(copy, own);
                copy.iter_mut().zip(out).for_each(|(copy, w)| *copy = C::store(*w));
            }
        }
    }

    fn bring_states(&self, cx: &Context<'_>, own: &Range<usize>) {
        for (from, to) in self.vars.states.iter().zip(&self.vars.state_outs) {
            self.bring(cx, from, to, own);
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
