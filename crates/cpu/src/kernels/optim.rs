//! Optimizer updates over the flat slices of a unit, each in one pass.
//!
//! The definitions are PyTorch's. Gradients are multiplied by a clip coefficient as they are read.
//! The weights that are updated have the accumulator's type; where the program computes in a
//! narrower type they are its master copy, and the narrow copy is written in the same pass.
//! Slices of different lengths are a mistake of the caller and panic.

use super::inlined::inlined;
use crate::element::{Element, Float, vectorized};

/// How the weight decay enters an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// The weights shrink by `lr · weight_decay`, apart from the gradient (AdamW).
    Decoupled,
    /// `weight_decay · weight` is added to the gradient (an L2 penalty).
    L2,
}

/// One step of AdamW, or of Adam if the decay is [`Decay::L2`].
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
    pub decay: Decay,
    /// The number of this step, from one; the bias corrections depend on it.
    pub step: u64,
    /// Multiplies every gradient.
    pub clip: f64,
}

/// One step of stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f64,
    /// Momentum; the buffer is used only if this is not zero.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// How the decay is applied.
    pub decay: Decay,
    /// Whether this is the first step, which sets the momentum buffer instead of reading it.
    pub first: bool,
    /// Multiplies every gradient.
    pub clip: f64,
}

/// What an optimizer updates: as many weights as gradients.
pub struct Weights<'a, W, C> {
    /// The weights, or their master copy.
    pub master: &'a mut [W],
    /// The narrow copy that the program reads, if there is one.
    pub copy: Option<&'a mut [C]>,
}

impl Adam {
    /// Updates `weights` and both moments from `grad`.
    pub fn update<G, A, C>(&self, grad: &[G], m: &mut [A], v: &mut [A], weights: Weights<'_, A, C>)
    where
        A: Float,
        G: Element<Acc = A>,
        C: Element<Acc = A>,
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

impl Sgd {
    /// Updates `weights` from `grad`, and the momentum buffer, which may be empty if there is no
    /// momentum.
    pub fn update<G, A, C>(&self, grad: &[G], buffer: &mut [A], weights: Weights<'_, A, C>)
    where
        A: Float,
        G: Element<Acc = A>,
        C: Element<Acc = A>,
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
        // The first step must not read the buffer, not even times zero: it may hold anything.
        assert_eq!(buffer.len(), grad.len());
        if self.first {
            buffer.fill(A::ZERO);
        }
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

/// The factor on the weights and the factor on the weights that joins the gradient.
fn decay_factors<A: Float>(decay: Decay, weight_decay: f64, lr: f64) -> (A, A) {
    match decay {
        Decay::Decoupled => (A::from_f64(1.0 - lr * weight_decay), A::ZERO),
        Decay::L2 => (A::ONE, A::from_f64(weight_decay)),
    }
}

/// Elements that are updated at a time, so that the narrow copy is made while they are in the
/// first-level cache.
const BLOCK: usize = 1024;

impl<A: Float, C: Element<Acc = A>> Weights<'_, A, C> {
    /// Applies `rule(gradients, state, weights)` block by block, and writes the narrow copy.
    #[inline(always)]
    fn update<G: Element, S>(
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
fn copy_block<A: Float, C: Element<Acc = A>>(master: &[A], copy: &mut [C]) {
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
fn adam_block<A: Float, G: Element<Acc = A>>(
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
fn plain_block<A: Float, G: Element<Acc = A>>(by: SgdNumbers<A>, grad: &[G], weights: &mut [A]) {
    for (grad, weight) in grad.iter().zip(weights) {
        let grad = grad.load() * by.clip + by.l2 * *weight;
        *weight = *weight * by.shrink - by.lr * grad;
    }
}

#[inline(always)]
fn momentum_block<A: Float, G: Element<Acc = A>>(
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
mod tests {
    use half::bf16;

    use super::super::testing::{assert_close, round, tolerance};
    use super::*;

    // All numbers below are the weights after five steps of
    //
    // import torch
    // def run(make, dt=torch.float64):
    //     w = torch.nn.Parameter(torch.tensor([0.5, -1.25, 2.0, 0.0078125, -3.5], dtype=dt))
    //     opt = make([w])
    //     for t in range(1, 6):
    //         w.grad = torch.tensor([0.1*t, -0.02, 0.5 - 0.3*t, 1e-6*t, 4.0/t], dtype=torch.float64).to(dt)
    //         opt.step()
    //     return [float(v) for v in w.detach()]
    // A, S = torch.optim.AdamW, torch.optim.SGD
    // run(lambda p: A(p, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False))
    // run(lambda p: A(p, lr=0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.0, foreach=False))
    // run(lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False))
    // run(lambda p: S(p, lr=0.05, foreach=False))
    // run(lambda p: S(p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False))
    // run(lambda p: S(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=False))
    const START: [f64; 5] = [0.5, -1.25, 2.0, 0.0078125, -3.5];
    const ADAMW: [f64; 5] = [
        0.44975197026706476,
        -1.1938624125062762,
        1.9962728017459406,
        -0.03971747835695632,
        -3.5271835225077988,
    ];
    const ADAMW_LARGE_EPS: [f64; 5] = [
        0.4501401755773094,
        -1.2023809523809526,
        2.010284157279419,
        0.007703620357550131,
        -3.542299178419145,
    ];
    const ADAM_L2: [f64; 5] = [
        0.45137007554184216,
        -1.2000166328976176,
        1.9867386129555358,
        0.0021809701432868693,
        -3.543105346361916,
    ];
    const SGD: [f64; 5] = [
        0.42499999999999993,
        -1.2450000000000006,
        2.0999999999999996,
        0.00781175,
        -3.956666666666667,
    ];
    const SGD_MOMENTUM: [f64; 5] = [
        0.33832889745251843,
        -1.2286660194523717,
        2.1338231663199494,
        0.007759632503397415,
        -4.95329195098981,
    ];
    const SGD_NESTEROV: [f64; 5] = [
        0.27843788591417995,
        -1.2227073802826685,
        2.2154078330644653,
        0.007744719108568968,
        -5.253133208311507,
    ];

    fn gradients<G: Element>(t: u64, clip: f64) -> Vec<G> {
        let t = t as f64;
        [0.1 * t, -0.02, 0.5 - 0.3 * t, 1e-6 * t, 4.0 / t].map(|g| round(g / clip)).to_vec()
    }

    /// Five steps of `update(step, gradients, weights, first state, second state)`, against
    /// PyTorch's weights.
    fn five_steps<A: Float, G: Element<Acc = A>>(
        want: &[f64; 5],
        clip: f64,
        update: impl Fn(u64, &[G], Weights<'_, A, G>, &mut [A], &mut [A]),
    ) {
        let mut master: Vec<A> = START.map(round).to_vec();
        let mut copy: Vec<G> = vec![G::default(); 5];
        let [mut m, mut v] = [(); 2].map(|()| vec![A::ZERO; 5]);
        for t in 1..=5 {
            // Every second step writes no copy, so that both loops are checked.
            let weights =
                Weights { master: &mut master, copy: (t % 2 == 1).then_some(&mut copy[..]) };
            update(t, &gradients(t, clip), weights, &mut m, &mut v);
        }
        // Narrow gradients are off by up to half a unit in their last place, and so is the sum of
        // the steps they make.
        let limit = tolerance::<G>(if G::DTYPE.size() == 2 { 2.0 } else { 16.0 });
        assert_close(&master, want, limit);
        let rounded: Vec<G> = master.iter().map(|w| G::store(*w)).collect();
        assert_eq!(copy, rounded);
    }

    fn adam_agrees<A: Float, G: Element<Acc = A>>() {
        let adamw = Adam {
            lr: 0.01,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            decay: Decay::Decoupled,
            step: 0,
            clip: 1.0,
        };
        let l2 = Adam { decay: Decay::L2, ..adamw };
        let large_eps = Adam { betas: [0.8, 0.99], eps: 1e-3, weight_decay: 0.0, ..adamw };
        let clipped = Adam { clip: 0.25, ..adamw };
        for (adam, want) in
            [(adamw, &ADAMW), (clipped, &ADAMW), (large_eps, &ADAMW_LARGE_EPS), (l2, &ADAM_L2)]
        {
            five_steps::<A, G>(want, adam.clip, |step, grad, weights, m, v| {
                Adam { step, ..adam }.update(grad, m, v, weights);
            });
        }
    }

    fn sgd_agrees<A: Float, G: Element<Acc = A>>() {
        let plain = Sgd {
            lr: 0.05,
            momentum: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            decay: Decay::L2,
            first: false,
            clip: 1.0,
        };
        let momentum = Sgd { momentum: 0.9, weight_decay: 0.01, clip: 0.5, ..plain };
        let nesterov = Sgd { nesterov: true, ..momentum };
        for (sgd, want) in [(plain, &SGD), (momentum, &SGD_MOMENTUM), (nesterov, &SGD_NESTEROV)] {
            five_steps::<A, G>(want, sgd.clip, |step, grad, weights, buffer, _| {
                // What the buffer holds before the first step must not matter.
                let first = step == 1;
                if first {
                    buffer.fill(A::NEG_INFINITY);
                }
                Sgd { first, ..sgd }.update(grad, buffer, weights);
            });
        }
    }

    #[test]
    fn adam_agrees_with_pytorch() {
        adam_agrees::<f64, f64>();
        adam_agrees::<f32, f32>();
        adam_agrees::<f32, bf16>();
    }

    #[test]
    fn sgd_agrees_with_pytorch() {
        sgd_agrees::<f64, f64>();
        sgd_agrees::<f32, f32>();
        sgd_agrees::<f32, bf16>();
    }

    #[test]
    fn decoupled_decay_shrinks_the_weights_alone() {
        let sgd = Sgd {
            lr: 0.5,
            momentum: 0.9,
            nesterov: false,
            weight_decay: 0.5,
            decay: Decay::Decoupled,
            first: true,
            clip: 1.0,
        };
        let (mut weight, mut buffer) = ([8.0f64], [0.0]);
        let weights = Weights { master: &mut weight, copy: None::<&mut [f64]> };
        sgd.update(&[2.0f64], &mut buffer, weights);
        assert_eq!((weight, buffer), ([8.0 * 0.75 - 0.5 * 2.0], [2.0]));
    }
}
