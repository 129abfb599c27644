//! The updates against PyTorch's.

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
const SGD: [f64; 5] =
    [0.42499999999999993, -1.2450000000000006, 2.0999999999999996, 0.00781175, -3.956666666666667];
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

fn gradients<G: CpuElement>(t: u64, clip: f64) -> Vec<G> {
    let t = t as f64;
    [0.1 * t, -0.02, 0.5 - 0.3 * t, 1e-6 * t, 4.0 / t].map(|g| round(g / clip)).to_vec()
}

/// Five steps of `update(step, gradients, weights, first state, second state)`, against
/// PyTorch's weights.
fn five_steps<A: CpuFloat, G: CpuElement<Acc = A>>(
    want: &[f64; 5],
    clip: f64,
    update: impl Fn(u64, &[G], UpdatedWeights<'_, A, G>, &mut [A], &mut [A]),
) {
    let mut master: Vec<A> = START.map(round).to_vec();
    let mut copy: Vec<G> = vec![G::default(); 5];
    let [mut m, mut v] = [(); 2].map(|()| vec![A::ZERO; 5]);
    for t in 1..=5 {
        // Every second step writes no copy, so that both loops are checked.
        let weights =
            UpdatedWeights { master: &mut master, copy: (t % 2 == 1).then_some(&mut copy[..]) };
        update(t, &gradients(t, clip), weights, &mut m, &mut v);
    }
    // Narrow gradients are off by up to half a unit in their last place, and so is the sum of
    // the steps they make.
    let limit = tolerance::<G>(if G::DTYPE.size() == 2 { 2.0 } else { 16.0 });
    assert_close(&master, want, limit);
    let rounded: Vec<G> = master.iter().map(|w| G::store(*w)).collect();
    assert_eq!(copy, rounded);
}

fn adam_agrees<A: CpuFloat, G: CpuElement<Acc = A>>() {
    let adamw = Adam {
        lr: 0.01,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.1,
        decay: DecayKind::Decoupled,
        step: 0,
        clip: 1.0,
    };
    let l2 = Adam { decay: DecayKind::L2, ..adamw };
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

fn sgd_agrees<A: CpuFloat, G: CpuElement<Acc = A>>() {
    let plain = SgdStep {
        lr: 0.05,
        momentum: 0.0,
        nesterov: false,
        weight_decay: 0.0,
        decay: DecayKind::L2,
        clip: 1.0,
    };
    let momentum = SgdStep { momentum: 0.9, weight_decay: 0.01, clip: 0.5, ..plain };
    let nesterov = SgdStep { nesterov: true, ..momentum };
    for (sgd, want) in [(plain, &SGD), (momentum, &SGD_MOMENTUM), (nesterov, &SGD_NESTEROV)] {
        five_steps::<A, G>(want, sgd.clip, |_, grad, weights, buffer, _| {
            sgd.update(grad, buffer, weights);
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
    let sgd = SgdStep {
        lr: 0.5,
        momentum: 0.9,
        nesterov: false,
        weight_decay: 0.5,
        decay: DecayKind::Decoupled,
        clip: 1.0,
    };
    let (mut weight, mut buffer) = ([8.0f64], [0.0]);
    let weights = UpdatedWeights { master: &mut weight, copy: None::<&mut [f64]> };
    sgd.update(&[2.0f64], &mut buffer, weights);
    assert_eq!((weight, buffer), ([8.0 * 0.75 - 0.5 * 2.0], [2.0]));
}
