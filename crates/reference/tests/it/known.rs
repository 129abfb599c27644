//! Elementwise ops, reductions, movement, products and collectives: small cases worked out by hand,
//! and functions as PyTorch 2 computes them in double precision.

use phalanx_ir::ops::{
    Binary, BinaryKind, Bounds, Cast, Collective, CollectiveKind, CompareKind, Fill, MemberScale,
    MemberSquares, Pad, SumSquares, UnaryKind,
};
use phalanx_ir::{Builder, DType, Mesh, Role};
use phalanx_reference::{RefTensor, TensorData, run, run_values};
use phalanx_testing::{ids, normal, tensor};

use crate::support::{assert_close, eval};

const TIGHT: f64 = 1e-14;

#[test]
fn unary_functions() {
    let x = tensor(&[5], &[-2.0, -0.5, 0.0, 1.0, 3.0]);
    let of = |kind| eval(&[("x", x.clone())], |_, v| vec![v[0].unary(kind)]).remove(0);
    #[rustfmt::skip]
    let cases: [(UnaryKind, [f64; 5]); 8] = [
        (UnaryKind::Neg, [2.0, 0.5, 0.0, -1.0, -3.0]),
        (UnaryKind::Square, [4.0, 0.25, 0.0, 1.0, 9.0]),
        (UnaryKind::Relu, [0.0, 0.0, 0.0, 1.0, 3.0]),
        (UnaryKind::Tanh, [-0.9640275800758169, -0.46211715726000974, 0.0, 0.7615941559557649, 0.9950547536867305]),
        (UnaryKind::Sigmoid, [0.11920292202211755, 0.3775406687981454, 0.5, 0.7310585786300049, 0.9525741268224334]),
        (UnaryKind::Gelu, [-0.04540230591222494, -0.15428599017485606, 0.0, 0.8411919906082768, 2.996362607918227]),
        (UnaryKind::GeluErf, [-0.04550026389635842, -0.15426876936299344, 0.0, 0.841344746068543, 2.99595030590511]),
        (UnaryKind::Silu, [-0.2384058440442351, -0.1887703343990727, 0.0, 0.7310585786300049, 2.8577223804672998]),
    ];
    for (kind, expected) in cases {
        assert_close(&of(kind), &expected, TIGHT);
    }
    let x = tensor(&[2], &[4.0, 0.25]);
    let of = |kind| eval(&[("x", x.clone())], |_, v| vec![v[0].unary(kind)]).remove(0);
    assert_eq!(of(UnaryKind::Sqrt).values(), [2.0, 0.5]);
    assert_eq!(of(UnaryKind::Rsqrt).values(), [0.5, 2.0]);
    assert_eq!(of(UnaryKind::Recip).values(), [0.25, 4.0]);
    assert_close(&of(UnaryKind::Log), &[2.0 * 2f64.ln(), -2.0 * 2f64.ln()], TIGHT);
    assert_close(&of(UnaryKind::Exp), &[54.598150033144236, 1.2840254166877414], TIGHT);
}

#[test]
fn binary_compare_and_select() {
    let a = tensor(&[2, 2], &[1.0, 5.0, -3.0, 4.0]);
    let b = tensor(&[2], &[2.0, 4.0]);
    let got = eval(&[("a", a), ("b", b)], |_, v| {
        let larger = v[0].compare(CompareKind::Ge, v[1]);
        vec![
            v[0] + v[1],
            v[0] - v[1],
            v[0] * v[1],
            v[0] / v[1],
            v[0].max(v[1]),
            v[0].min(v[1]),
            larger,
            larger.select(v[0], v[0].scale(10.0)),
            v[0].shift(0.5),
        ]
    });
    let values: Vec<Vec<f64>> = got.iter().map(RefTensor::values).collect();
    assert_eq!(values[0], [3.0, 9.0, -1.0, 8.0]);
    assert_eq!(values[1], [-1.0, 1.0, -5.0, 0.0]);
    assert_eq!(values[2], [2.0, 20.0, -6.0, 16.0]);
    assert_eq!(values[3], [0.5, 1.25, -1.5, 1.0]);
    assert_eq!(values[4], [2.0, 5.0, 2.0, 4.0]);
    assert_eq!(values[5], [1.0, 4.0, -3.0, 4.0]);
    assert_eq!(*got[6].data(), TensorData::Bool(vec![false, true, false, true]));
    assert_eq!(values[7], [10.0, 5.0, -30.0, 4.0]);
    assert_eq!(values[8], [1.5, 5.5, -2.5, 4.5]);
}

#[test]
fn comparisons_of_every_kind_and_integers() {
    use CompareKind::{Eq, Ge, Gt, Le, Lt, Ne};
    let (a, b) = (ids(&[3], &[1, 2, 3]), ids(&[3], &[2, 2, 2]));
    for (kind, expected) in [
        (Eq, [0.0, 1.0, 0.0]),
        (Ne, [1.0, 0.0, 1.0]),
        (Lt, [1.0, 0.0, 0.0]),
        (Le, [1.0, 1.0, 0.0]),
        (Gt, [0.0, 0.0, 1.0]),
        (Ge, [0.0, 1.0, 1.0]),
    ] {
        let got =
            eval(&[("a", a.clone()), ("b", b.clone())], |_, v| vec![v[0].compare(kind, v[1])]);
        assert_eq!(got[0].values(), expected, "{kind:?}");
    }
    use BinaryKind::{Add, Max, Min, Mul, Sub};
    for (kind, expected) in
        [(Add, [3, 4, 5]), (Sub, [-1, 0, 1]), (Mul, [2, 4, 6]), (Max, [2, 2, 3]), (Min, [1, 2, 2])]
    {
        let got =
            eval(&[("a", a.clone()), ("b", b.clone())], |f, v| vec![f.apply(Binary { kind }, v)]);
        assert_eq!(*got[0].data(), TensorData::Int(expected.to_vec()), "{kind:?}");
    }
}

#[test]
fn every_instruction_rounds_to_its_type() {
    let b = Builder::new("rounding", DType::F32);
    let x = b.data("x", DType::F32, [1]);
    let y = (x + b.constant(DType::F32, [1], 1.0)) - b.constant(DType::F32, [1], 1.0);
    b.probe("y", y);
    b.probe("narrow", x.cast(DType::Bf16));
    b.probe("count", b.apply(Cast { to: DType::I32 }, &[x.scale(-1e10)]));
    let program = b.finish().unwrap();
    let tiny = RefTensor::from_f32(&[1], &[1.1e-7]).unwrap();
    let outputs = run(&program, &[("x", tiny)]).unwrap();
    // 1 + 1.1e-7 is 1 + 2⁻²³ in single precision.
    assert_eq!(outputs[0].1.values(), [2f64.powi(-23)]);
    // 1.1e-7 = 1.8454… · 2⁻²⁴, and 0.8454 · 128 rounds to 108.
    assert_eq!(outputs[1].1.values(), [(1.0 + 108.0 / 128.0) * 2f64.powi(-24)]);
    // −1100 and a little; integers are cut towards zero, singles hold it to 2⁻¹³.
    assert_eq!(*outputs[2].1.data(), TensorData::Int(vec![-1100]));
}

#[test]
fn reductions_and_movement() {
    let x = tensor(&[2, 3], &[1.0, 2.0, 3.0, -4.0, 5.0, -6.0]);
    let got = eval(&[("x", x.clone())], |b, v| {
        vec![
            v[0].sum(&[0]),
            v[0].sum(&[1]),
            v[0].max_over(&[0]),
            v[0].max_over(&[0, 1]),
            v[0].sum(&[0]).broadcast([3, 2], &[1]),
            v[0].reshape([3, 2]),
            v[0].transpose(&[1, 0]),
            v[0].slice(1, 1, 2),
            b.apply(Pad { dim: 1, before: 1, after: 0 }, v),
            b.concat(&[v[0], v[0].slice(0, 1, 1)], 0),
            b.apply(Fill { dtype: DType::I32, shape: vec![2], value: 7.0 }, &[]),
        ]
    });
    let expected: [&[f64]; 11] = [
        &[-3.0, 7.0, -3.0],
        &[6.0, -5.0],
        &[1.0, 5.0, 3.0],
        &[5.0],
        &[-3.0, -3.0, 7.0, 7.0, -3.0, -3.0],
        &[1.0, 2.0, 3.0, -4.0, 5.0, -6.0],
        &[1.0, -4.0, 2.0, 5.0, 3.0, -6.0],
        &[2.0, 3.0, 5.0, -6.0],
        &[0.0, 1.0, 2.0, 3.0, 0.0, -4.0, 5.0, -6.0],
        &[1.0, 2.0, 3.0, -4.0, 5.0, -6.0, -4.0, 5.0, -6.0],
        &[7.0, 7.0],
    ];
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.values(), expected);
    }
}

#[test]
fn products() {
    let (a, b) = (tensor(&[2, 2], &[1.0, 2.0, 3.0, 4.0]), tensor(&[2, 2], &[5.0, 6.0, 7.0, 8.0]));
    for (spec, expected) in [
        ("ab,bc->ac", &[19.0, 22.0, 43.0, 50.0][..]),
        ("ab,cb->ac", &[17.0, 23.0, 39.0, 53.0]),
        ("ba,bc->ca", &[26.0, 38.0, 30.0, 44.0]),
        ("ab,ab->ab", &[5.0, 12.0, 21.0, 32.0]),
        ("ab,ab->", &[70.0]),
        (
            "ab,cd->abcd",
            &[
                5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0, 15.0, 18.0, 21.0, 24.0, 20.0, 24.0,
                28.0, 32.0,
            ],
        ),
    ] {
        let got = eval(&[("a", a.clone()), ("b", b.clone())], |_, v| vec![v[0].einsum(v[1], spec)]);
        assert_eq!(got[0].values(), expected, "{spec}");
    }
}

#[test]
fn embeddings() {
    let table = tensor(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let got = eval(&[("table", table), ("ids", ids(&[3], &[2, 0, 2]))], |_, v| {
        vec![v[0].embedding(v[1])]
    });
    assert_eq!(got[0].values(), [5.0, 6.0, 1.0, 2.0, 5.0, 6.0]);
}

#[test]
fn sums_of_squares_and_every_value() {
    let b = Builder::new("norm", DType::F32);
    let x = b.data("x", DType::F32, [2]);
    b.probe("y", b.apply(SumSquares, &[x]));
    let program = b.finish().unwrap();
    let x = RefTensor::from_f32(&[2], &[3.0, 4.0]).unwrap();
    let values = run_values(&program, &[("x", x.clone())]).unwrap();
    assert_eq!(values, [x, RefTensor::scalar(DType::F32, 25.0)]);
}

/// Two blocks of two members, with a gap between the members.
#[test]
fn members_of_a_unit() {
    let bounds = Bounds { members: vec![(0, 1), (2, 4)], block: 4 };
    let x = tensor(&[8], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let got = eval(&[("x", x), ("f", tensor(&[2], &[10.0, -1.0]))], |b, v| {
        vec![
            b.apply(MemberSquares { bounds: bounds.clone() }, &[v[0]]),
            b.apply(MemberScale { bounds: bounds.clone() }, &[v[0], v[1]]),
        ]
    });
    assert_eq!(got[0].values(), [26.0, 138.0]);
    assert_eq!(got[1].values(), [10.0, 2.0, -3.0, -4.0, 50.0, 6.0, -7.0, -8.0]);
}

#[test]
fn collectives_leave_the_whole_value_as_it_is() {
    let mesh: Mesh = "dp=2".parse().unwrap();
    let (dp, _) = mesh.axes().next().unwrap();
    let b = Builder::on("collectives", DType::F64, mesh);
    let act = |kind, value| b.apply(Collective::new(kind, vec![dp]), &[value]);
    let x = b.typed("x", Role::Data, "f64[4,2]{0:dp}");
    let whole = act(CollectiveKind::AllGather { dim: 0 }, x);
    let partial = x.sum(&[0]);
    let reduced = act(CollectiveKind::AllReduce, partial);
    let back = act(CollectiveKind::Shard { dim: 0 }, whole);
    for (name, value) in [("whole", whole), ("reduced", reduced), ("back", back)] {
        b.probe(name, value);
    }
    let x = normal("x", &[4, 2]);
    let outputs = run(&b.finish().unwrap(), &[("x", x.clone())]).unwrap();
    assert_eq!(outputs[0].1, x);
    assert_eq!(outputs[2].1, x);
    let x = x.values();
    let column = |i: usize| x[i] + x[2 + i] + x[4 + i] + x[6 + i];
    assert_close(&outputs[1].1, &[column(0), column(1)], TIGHT);
}
