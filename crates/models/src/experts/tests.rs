//! What routers compute, by the papers' formulas and by hand.

use phalanx_ir::random::{normal_at, uniform_at};
use phalanx_ir::{DType, Op, Program};
use phalanx_reference::{RefTensor, run};

use super::*;

const KEY: [i32; 5] = [1, 2, 3, 4, 5];
const TOKENS: usize = 4096;
/// The number of the first random op of a segment.
const SITE: u32 = 1;

/// Two experts of width one, and nothing but what a router chooses.
fn two(router: Router) -> Experts {
    Experts { capacity: Capacity::Dropless, aux_loss: 0.0, ..Experts::new(2, 1, router) }
}

fn tensor(shape: &[usize], values: &[f64]) -> RefTensor {
    RefTensor::from_f64(shape, values).unwrap()
}

/// Runs a program on those of these inputs that it has, and gives what it exposes under a name.
fn shown(program: &Program, given: Vec<(&str, RefTensor)>, name: &str) -> Vec<f64> {
    let key = ("key", RefTensor::from_i32(&[5], &KEY).unwrap());
    let inputs: Vec<_> = (given.into_iter().chain([key]))
        .filter(|(name, _)| program.inputs().iter().any(|port| port.name == *name))
        .collect();
    let found = run(program, &inputs).unwrap().into_iter().find(|(own, _)| own == name);
    found.map_or(vec![], |(_, tensor)| tensor.values())
}

/// Numbers from −2 to 2.
fn spread() -> Vec<f64> {
    (0..TOKENS).map(|i| i as f64 / 1024.0 - 2.0).collect()
}

/// A second expert is taken with twice its gate as probability, and the first always: counted over
/// 4096 tokens beside the formula of the paper.
#[test]
fn gshards_second_choice_is_random() {
    let chosen = |purpose| -> Vec<f64> {
        let b = Builder::new("gshard", DType::F64);
        let x = b.data("x", DType::F64, [1, TOKENS, 1]);
        let shape = BatchShape { batch: 1, seq: TOKENS };
        b.probe("y", two(Router::GShard).apply(&b, x, shape, purpose));
        let ones = || tensor(&[2, 1, 1], &[1.0; 2]);
        let given = vec![
            ("x", tensor(&[1, TOKENS, 1], &spread())),
            ("experts.router", tensor(&[1, 2], &[1.0, 0.0])),
            ("experts.gate", ones()),
            ("experts.up", ones()),
            ("experts.down", ones()),
        ];
        shown(&b.finish().unwrap(), given, port::CHOSEN)
    };
    // The logits of a token are (x, 0); the smaller of two gates is 1 / (1 + e^|x|).
    let expected: f64 = spread().iter().map(|x| 2.0 / (1.0 + x.abs().exp())).sum();
    let taken = chosen(Purpose::Train).iter().sum::<f64>() - TOKENS as f64;
    // Four standard deviations of so many coins.
    assert!((taken - expected).abs() < 4.0 * 32.0, "{taken} of {expected}");
    // Nothing is random, nor counted, where a model is not trained.
    assert!(chosen(Purpose::Evaluate).is_empty());
}

/// The logits of two samples of three tokens of width two, for a router of three experts.
fn logits(experts: &Experts, purpose: Purpose, given: &[(&'static str, Vec<f64>)]) -> Vec<f64> {
    let b = Builder::new("router", DType::F64);
    let x = b.data("x", DType::F64, [2, 1, 3, 2]);
    b.probe("logits", experts.logits(&b, x, purpose));
    let shape = |name: &str| if name == "x" { vec![2, 1, 3, 2] } else { vec![2, 3] };
    let given = given.iter().map(|(name, values)| (*name, tensor(&shape(name), values))).collect();
    shown(&b.finish().unwrap(), given, "logits")
}

fn numbers(count: usize, by: f64) -> Vec<f64> {
    (0..count).map(|i| (i as f64 * by).sin()).collect()
}

/// Row i of x times w, which has three columns.
fn products(x: &[f64], w: &[f64]) -> Vec<f64> {
    let row = |x: &[f64; 2]| [0, 1, 2].map(|e| x[0] * w[e] + x[1] * w[3 + e]);
    x.as_chunks::<2>().0.iter().flat_map(row).collect()
}

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-14, "{apart}: {found:?} {expected:?}");
}

/// x · (1 + ε(2u − 1)), with the numbers that belong to each element's sample and place.
#[test]
fn jitter_multiplies_what_the_router_sees() {
    const JITTER: f64 = 0.3;
    let (x, w) = (numbers(12, 0.7), numbers(6, 1.3));
    let experts = Experts { jitter: JITTER, ..Experts::new(3, 1, Router::Switch) };
    let found =
        |purpose| logits(&experts, purpose, &[("x", x.clone()), ("experts.router", w.clone())]);
    let factor = |i: usize| {
        let u = uniform_at(KEY, SITE, (i / 6) as u64, (i % 6) as u64);
        1.0 + JITTER * (2.0 * u - 1.0)
    };
    let seen: Vec<f64> = x.iter().enumerate().map(|(i, x)| x * factor(i)).collect();
    assert!((0..12).all(|i| (0.7..1.3).contains(&factor(i)) && factor(i) != 1.0));
    close(&found(Purpose::Train), &products(&seen, &w));
    close(&found(Purpose::Evaluate), &products(&x, &w));
}

/// H(x) = x·W + normal · softplus(x·W_noise) (Shazeer et al., 2017, equation 4).
#[test]
fn noise_has_the_deviation_that_the_router_learns() {
    let (x, w, noise) = (numbers(12, 0.7), numbers(6, 1.3), numbers(6, 2.1));
    let experts = Experts::new(3, 1, Router::Noisy { k: 2 });
    let given = [("x", x.clone()), ("experts.router", w.clone()), ("experts.noise", noise.clone())];
    let drawn = |i: usize| normal_at(KEY, SITE, (i / 9) as u64, (i % 9) as u64);
    let sums = products(&x, &w).into_iter().zip(products(&x, &noise)).enumerate();
    let noisy: Vec<f64> = sums.map(|(i, (mean, s))| mean + drawn(i) * s.exp().ln_1p()).collect();
    close(&logits(&experts, Purpose::Train, &given), &noisy);
    close(&logits(&experts, Purpose::Evaluate, &given), &products(&x, &w));
}

/// The balancing loss of some experts whose router sees ones and has these weights.
fn balance(router: Router, scope: AuxScope, weights: [f64; 4]) -> f64 {
    let experts =
        Experts { aux_loss: 1.0, aux_scope: scope, group: Some(2), ..Experts::new(4, 1, router) };
    let b = Builder::new("balance", DType::F64);
    let x = b.data("x", DType::F64, [3, 6, 1]);
    b.probe("y", experts.apply(&b, x, BatchShape { batch: 3, seq: 6 }, Purpose::Train));
    let ones = || tensor(&[4, 1, 1], &[1.0; 4]);
    let given = vec![
        ("x", tensor(&[3, 6, 1], &[1.0; 18])),
        (port::INV_SAMPLES, RefTensor::scalar(DType::F64, 1.0 / 3.0)),
        ("experts.router", tensor(&[1, 4], &weights)),
        ("experts.gate", ones()),
        ("experts.up", ones()),
        ("experts.down", ones()),
    ];
    shown(&b.finish().unwrap(), given, "aux")[0]
}

/// As many experts as there are where one takes all, one where probabilities are even; k experts that
/// share everything give E/k.
#[test]
fn the_balancing_loss_is_one_where_all_are_equal() {
    for scope in [AuxScope::Group, AuxScope::MicroBatch] {
        for (router, collapsed) in
            [(Router::Switch, 4.0), (Router::GShard, 4.0), (Router::TopK { k: 2 }, 2.0)]
        {
            let even = balance(router, scope, [0.0; 4]);
            assert!((even - 1.0).abs() < 1e-12, "{router:?} {scope:?}: {even}");
            let one = balance(router, scope, [0.0, 90.0, 0.0, 0.0]);
            // Of two choices, the second is any other: its probability is zero.
            assert!((one - collapsed).abs() < 1e-12, "{router:?} {scope:?}: {one}");
        }
        let two = balance(Router::TopK { k: 2 }, scope, [0.0, 90.0, 90.0, 0.0]);
        assert!((two - 2.0).abs() < 1e-12, "{scope:?}: {two}");
    }
}

/// Switch: the variance is 0.1 divided by the inputs of a matrix.
#[test]
fn initial_weights_may_have_a_scale_of_their_own() {
    let own = Experts { init_scale: Some(0.1), ..Experts::new(4, 50, Router::Switch) };
    let deviation = |inputs: f64| Some(Init::Normal((0.1 / inputs).sqrt()));
    assert_eq!(own.init("experts.gate", 200), deviation(200.0));
    assert_eq!(own.init("experts.router", 200), deviation(200.0));
    assert_eq!(own.init("experts.down", 200), deviation(50.0));
    assert_eq!(own.init("attn.q", 200), None);
    assert_eq!(Experts::new(4, 50, Router::Switch).init("experts.gate", 200), None);
}

/// Training alone draws numbers; evaluation has places of its own, and a prediction drops nobody.
#[test]
fn each_purpose_has_its_places_and_its_noise() {
    let experts = Experts {
        jitter: 0.1,
        dropout: 0.4,
        capacity: Capacity::Factor(1.0),
        eval_capacity: Some(Capacity::Factor(2.0)),
        ..Experts::new(4, 3, Router::Noisy { k: 2 })
    };
    let of = |purpose| {
        let b = Builder::new("experts", DType::F64);
        let x = b.data("x", DType::F64, [2, 8, 5]);
        b.probe("y", experts.apply(&b, x, BatchShape { batch: 2, seq: 8 }, purpose));
        let program = b.finish().unwrap();
        let draws = program.instrs().iter().filter(|i| match i.op {
            Op::Noise(_) => true,
            Op::Dropout(d) => d.p == 0.4,
            _ => false,
        });
        let places = program.instrs().iter().find_map(|i| match i.op {
            Op::Dispatch(d) => Some(d.capacity),
            _ => None,
        });
        (draws.count(), places.unwrap(), program.inputs().len())
    };
    // An even share is 8 · 2 / 4 places.
    assert_eq!((of(Purpose::Train).0, of(Purpose::Train).1), (3, 4));
    assert_eq!((of(Purpose::Evaluate).0, of(Purpose::Evaluate).1), (0, 8));
    // Rows are packed: as many as tokens have choices.
    assert_eq!((of(Purpose::Predict).0, of(Purpose::Predict).1), (0, 16));
    let all = Experts { capacity: Capacity::Factor(4.0), ..experts.clone() };
    assert_eq!(all.places(8, Purpose::Train).capacity, 8);
}
