//! Optimizer updates over the flat slices of a unit, each in one pass.
//!
//! The definitions are PyTorch's; Lion's and LAMB's are those of their papers. Gradients are multiplied by a clip coefficient as they are read.
//! The weights that are updated have the accumulator's type; where the program computes in a
//! narrower type they are its master copy, and the narrow copy is written in the same pass.
//! Slices of different lengths are a mistake of the caller and panic.

use super::inlined::inlined;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// How weight decay is applied in an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayKind {
    /// The weights shrink by `lr · weight_decay`, apart from the gradient (AdamW).
    Decoupled,
    /// `weight_decay · weight` is added to the gradient (an L2 penalty).
    L2,
}

/// One step of AdamW, or of Adam if the decay is [`DecayKind::L2`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rates of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the corrected second moment.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// How the decay is applied.
    pub decay: DecayKind,
    /// The number of this step, from one; the bias corrections depend on it.
    pub step: u64,
    /// Multiplies every gradient.
    pub clip: f64,
}

/// One step of stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Momentum; the buffer is used only if this is not zero.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// How the decay is applied.
    pub decay: DecayKind,
    /// Multiplies every gradient.
    pub clip: f64,
}

/// One step of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Share of the mean in the direction, and share of it that is kept.
    pub betas: [f64; 2],
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Multiplies every gradient.
    pub clip: f64,
}

/// The direction of a step of LAMB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LambStep {
    /// Decay rates of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the corrected second moment.
    pub eps: f64,
    /// Weight decay, a part of the direction.
    pub weight_decay: f64,
    /// The number of this step, from one.
    pub step: u64,
    /// Multiplies every gradient.
    pub clip: f64,
}

/// What an optimizer updates: as many weights as gradients.
pub struct UpdatedWeights<'a, W, C> {
    /// The weights, or their master copy.
    pub master: &'a mut [W],
    /// The narrow copy that the program reads, if there is one.
    pub copy: Option<&'a mut [C]>,
}

impl Adam {
    /// Updates `weights` and both moments from `grad`.
    pub fn update<G, A, C>(
        &self,
        grad: &[G],
        m: &mut [A],
        v: &mut [A],
        weights: UpdatedWeights<'_, A, C>,
    ) where
        A: CpuFloat,
        G: CpuElement<Acc = A>,
        C: CpuElement<Acc = A>,
    {
        let [beta1, beta2] = self.betas;
        let steps = self.step as f64;
        let (shrink, l2) = decay_factors(self.decay, self.weight_decay, self.lr);
        let numbers = AdamNumbers {
            clip: A::from_f64(self.clip),
            shrink,
            l2,
            new1: A::from_f64(1.0 - beta1),
            keep2: A::from_f64(beta2),
            new2: A::from_f64(1.0 - beta2),
            step_size: A::from_f64(self.lr / (1.0 - beta1.powf(steps))),
            root: A::from_f64((1.0 - beta2.powf(steps)).sqrt()),
            eps: A::from_f64(self.eps),
        };
        assert_eq!([m.len(), v.len()], [grad.len(); 2]);
        let moments = m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK));
        weights.update(
            grad,
            moments,
            inlined!(|grad, (m, v), weights| {
                adam_block(numbers, grad, m, v, weights);
            }),
        );
    }
}

impl SgdStep {
    /// Updates `weights` from `grad`, and the momentum buffer, which is zero before the first step
    /// and may be empty if there is no momentum.
    pub fn update<G, A, C>(&self, grad: &[G], buffer: &mut [A], weights: UpdatedWeights<'_, A, C>)
    where
        A: CpuFloat,
        G: CpuElement<Acc = A>,
        C: CpuElement<Acc = A>,
    {
        let (shrink, l2) = decay_factors(self.decay, self.weight_decay, self.lr);
        let numbers = SgdNumbers {
            clip: A::from_f64(self.clip),
            shrink,
            l2,
            lr: A::from_f64(self.lr),
            momentum: A::from_f64(self.momentum),
            nesterov: self.nesterov,
        };
        if self.momentum == 0.0 {
            let nothing = std::iter::repeat(());
            weights.update(
                grad,
                nothing,
                inlined!(|grad, (), weights| {
                    plain_block(numbers, grad, weights);
                }),
            );
            return;
        }
        assert_eq!(buffer.len(), grad.len());
        let blocks = buffer.chunks_mut(BLOCK);
        weights.update(
            grad,
            blocks,
            inlined!(|grad, buffer, weights| {
                momentum_block(numbers, grad, buffer, weights);
            }),
        );
    }
}

impl LionStep {
    /// Updates `weights` and their mean from `grad`.
    pub fn update<G, A, C>(&self, grad: &[G], mean: &mut [A], weights: UpdatedWeights<'_, A, C>)
    where
        A: CpuFloat,
        G: CpuElement<Acc = A>,
        C: CpuElement<Acc = A>,
    {
        let [keep1, keep2] = self.betas.map(A::from_f64);
        let [new1, new2] = self.betas.map(|beta| A::from_f64(1.0 - beta));
        let [clip, lr, decay] = [self.clip, self.lr, self.weight_decay].map(A::from_f64);
        assert_eq!(mean.len(), grad.len());
        weights.update(
            grad,
            mean.chunks_mut(BLOCK),
            inlined!(|grad, mean, weights| {
                for ((grad, mean), weight) in grad.iter().zip(mean.iter_mut()).zip(weights) {
                    let grad: A = grad.load() * clip;
                    let turned = *mean * keep1 + grad * new1;
                    *weight -= lr * (sign(turned) + decay * *weight);
                    *mean = *mean * keep2 + grad * new2;
                }
            }),
        );
    }
}

/// −1, 0 or 1.
#[inline(always)]
fn sign<A: CpuFloat>(x: A) -> A {
    let above = if x > A::ZERO { A::ONE } else { A::ZERO };
    if x < A::ZERO { -A::ONE } else { above }
}

impl LambStep {
    /// Writes the direction for `weights`, and updates both moments.
    pub fn direction<G, A>(
        &self,
        grad: &[G],
        moments: [&mut [A]; 2],
        weights: &[A],
        direction: &mut [A],
    ) where
        A: CpuFloat,
        G: CpuElement<Acc = A>,
    {
        let [beta1, beta2] = self.betas;
        let steps = self.step as f64;
        let [m, v] = moments;
        assert_eq!([m.len(), v.len(), weights.len(), direction.len()], [grad.len(); 4]);
        let [clip, eps, decay] = [self.clip, self.eps, self.weight_decay].map(A::from_f64);
        let [new1, keep2, new2] = [1.0 - beta1, beta2, 1.0 - beta2].map(A::from_f64);
        let first = A::from_f64(1.0 - beta1.powf(steps));
        let root = A::from_f64((1.0 - beta2.powf(steps)).sqrt());
        vectorized(inlined!(|| {
            let moments = m.iter_mut().zip(v.iter_mut());
            let weights = weights.iter().zip(direction.iter_mut());
            for ((grad, (m, v)), (weight, direction)) in grad.iter().zip(moments).zip(weights) {
                let grad: A = grad.load() * clip;
                *m += (grad - *m) * new1;
                *v = *v * keep2 + grad * grad * new2;
                *direction = (*m / first) / (v.sqrt() / root + eps) + decay * *weight;
            }
        }));
    }
}

/// Two factors on the weights: one that scales them, and one that is added to the gradient.
fn decay_factors<A: CpuFloat>(decay: DecayKind, weight_decay: f64, lr: f64) -> (A, A) {
    match decay {
        DecayKind::Decoupled => (A::from_f64(1.0 - lr * weight_decay), A::ZERO),
        DecayKind::L2 => (A::ONE, A::from_f64(weight_decay)),
    }
}

/// Elements that are updated at a time, so that the narrow copy is made while they are in the
/// first-level cache.
const BLOCK: usize = 1024;

impl<A: CpuFloat, C: CpuElement<Acc = A>> UpdatedWeights<'_, A, C> {
    /// Applies `rule(gradients, state, weights)` block by block, and writes the narrow copy.
    #[inline(always)]
    fn update<G: CpuElement, S>(
        self,
        grad: &[G],
        state: impl Iterator<Item = S>,
        rule: impl Fn(&[G], S, &mut [A]),
    ) {
        let Self { master, copy } = self;
        let copied = copy.as_ref().map_or(grad.len(), |copy| copy.len());
        assert_eq!([master.len(), copied], [grad.len(); 2]);
        let blocks = grad.chunks(BLOCK).zip(state);
        vectorized(inlined!(|| {
            let mut copies = copy.map(|copy| copy.chunks_mut(BLOCK));
            for ((grad, state), master) in blocks.zip(master.chunks_mut(BLOCK)) {
                rule(grad, state, master);
                if let Some(copy) = copies.as_mut().and_then(Iterator::next) {
                    copy_block(master, copy);
                }
            }
        }));
    }
}

#[inline(always)]
fn copy_block<A: CpuFloat, C: CpuElement<Acc = A>>(master: &[A], copy: &mut [C]) {
    for (copy, weight) in copy.iter_mut().zip(master) {
        *copy = C::store(*weight);
    }
}

/// What one step of Adam multiplies and adds, in the type it computes in.
#[derive(Clone, Copy)]
struct AdamNumbers<A> {
    clip: A,
    shrink: A,
    l2: A,
    new1: A,
    keep2: A,
    new2: A,
    step_size: A,
    root: A,
    eps: A,
}

#[inline(always)]
fn adam_block<A: CpuFloat, G: CpuElement<Acc = A>>(
    by: AdamNumbers<A>,
    grad: &[G],
    m: &mut [A],
    v: &mut [A],
    weights: &mut [A],
) {
    let moments = m.iter_mut().zip(v);
    for ((grad, (m, v)), weight) in grad.iter().zip(moments).zip(weights) {
        let grad = grad.load() * by.clip + by.l2 * *weight;
        *m += (grad - *m) * by.new1;
        *v = *v * by.keep2 + grad * grad * by.new2;
        let denominator = v.sqrt() / by.root + by.eps;
        *weight = *weight * by.shrink - by.step_size * (*m / denominator);
    }
}

/// What one step of gradient descent multiplies and adds, in the type it computes in.
#[derive(Clone, Copy)]
struct SgdNumbers<A> {
    clip: A,
    shrink: A,
    l2: A,
    lr: A,
    momentum: A,
    nesterov: bool,
}

#[inline(always)]
fn plain_block<A: CpuFloat, G: CpuElement<Acc = A>>(
    by: SgdNumbers<A>,
    grad: &[G],
    weights: &mut [A],
) {
    for (grad, weight) in grad.iter().zip(weights) {
        let grad = grad.load() * by.clip + by.l2 * *weight;
        *weight = *weight * by.shrink - by.lr * grad;
    }
}

#[inline(always)]
fn momentum_block<A: CpuFloat, G: CpuElement<Acc = A>>(
    by: SgdNumbers<A>,
    grad: &[G],
    buffer: &mut [A],
    weights: &mut [A],
) {
    for ((grad, buffer), weight) in grad.iter().zip(buffer).zip(weights) {
        let grad = grad.load() * by.clip + by.l2 * *weight;
        *buffer = *buffer * by.momentum + grad;
        let ahead = grad + *buffer * by.momentum;
        let direction = if by.nesterov { ahead } else { *buffer };
        *weight = *weight * by.shrink - by.lr * direction;
    }
}

#[cfg(test)]
mod tests;
