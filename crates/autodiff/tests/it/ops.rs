//! Gradients of the plain ops: elementwise, reductions, movement, products.

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::ops::{Binary, BinaryKind, Cast, CompareKind, Matmul, Pad, UnaryKind};
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Program};
use phalanx_reference::{RefTensor, run};
use phalanx_testing::{normal, tensor};

use crate::check::Check;

/// Numbers away from zero, where roots, logarithms and reciprocals are tame.
fn positive(name: &str, shape: &[usize]) -> RefTensor {
    let values: Vec<f64> = (normal(name, shape).values().iter()).map(|x| 0.5 + x.abs()).collect();
    tensor(shape, &values)
}

/// Forward and backward of a program at once: the loss, then the gradients.
fn fbw(b: Builder, grads: DType) -> Program {
    let joint = joint(&b.finish().unwrap(), grads).unwrap();
    slice(&joint, Recompute::None).fbw
}

#[test]
fn unary_kinds() {
    for kind in UnaryKind::ALL {
        let name = format!("{kind:?}");
        let needs_positive =
            matches!(kind, UnaryKind::Log | UnaryKind::Sqrt | UnaryKind::Rsqrt | UnaryKind::Recip);
        let x = match needs_positive {
            true => positive(&name, &[3, 4]),
            false => normal(&name, &[3, 4]),
        };
        Check::new(name).given("x", x).run(|_, v| v[0].unary(kind));
    }
}

#[test]
fn binary_kinds_on_equal_shapes_and_repeated_suffixes() {
    for kind in BinaryKind::ALL {
        for shape in [&[2, 3, 4][..], &[3, 4], &[4], &[]] {
            let name = format!("{kind:?} {shape:?}");
            let b = positive(&name, shape);
            Check::new(name)
                .param("a", &[2, 3, 4])
                .given("b", b)
                .run(|b, v| b.apply(Binary { kind }, &[v[0], v[1]]));
        }
    }
}

#[test]
fn a_value_used_twice_gets_both_gradients() {
    Check::new("twice").param("x", &[5]).run(|_, v| v[0] * v[0] + v[0]);
}

#[test]
fn select_takes_the_side_of_its_condition() {
    Check::new("select")
        .param("a", &[4, 3])
        .param("b", &[4, 3])
        .data("x", normal("select.x", &[4, 3]))
        .data("y", normal("select.y", &[3]))
        .run(|_, v| v[2].compare(CompareKind::Gt, v[3]).select(v[0], v[1]));
}

#[test]
fn scale_shift_and_cast() {
    Check::new("scale").param("x", &[4]).run(|_, v| v[0].scale(-1.7));
    Check::new("shift").param("x", &[4]).run(|_, v| v[0].shift(0.3).square());
    Check::new("cast").param("x", &[4]).run(|b, v| b.apply(Cast { to: DType::F64 }, &[v[0]]));
}

/// Differences cannot see through rounding, so here the gradient is known: the cotangent, rounded
/// to the narrow type on its way back.
#[test]
fn a_narrowing_cast_passes_the_cotangent_in_the_narrow_type() {
    for to in [DType::F32, DType::Bf16] {
        let b = Builder::new("cast", DType::F64);
        let (x, w) = (b.param("x", [6]), b.data("w", DType::F64, [6]));
        b.loss("loss", (x.cast(to).cast(DType::F64) * w).sum_all());
        let fbw = fbw(b, DType::F64);
        let w = normal("cotangent", &[6]);
        let outputs = run(&fbw, &[("x", normal("x", &[6])), ("w", w.clone())]).unwrap();
        let rounded = RefTensor::new(to, &[6], &w.values()).unwrap();
        assert_eq!(outputs[1].1.values(), rounded.values());
    }
}

#[test]
fn sums_and_maxima() {
    for dims in [&[][..], &[0], &[1], &[0, 2], &[0, 1, 2]] {
        Check::new(format!("sum {dims:?}")).param("x", &[2, 3, 4]).run(|_, v| v[0].sum(dims));
        Check::new(format!("max {dims:?}")).param("x", &[2, 3, 4]).run(|_, v| v[0].max_over(dims));
    }
}

#[test]
fn broadcasts() {
    Check::new("broadcast").param("x", &[3, 2]).run(|_, v| v[0].broadcast([4, 3, 5, 2], &[0, 2]));
    Check::new("broadcast of a scalar").param("x", &[]).run(|_, v| v[0].broadcast([2, 2], &[0, 1]));
}

#[test]
fn movement() {
    Check::new("reshape").param("x", &[4, 6]).run(|_, v| v[0].reshape([2, 2, 6]));
    Check::new("transpose").param("x", &[2, 3, 4]).run(|_, v| v[0].transpose(&[2, 0, 1]));
    Check::new("slice").param("x", &[2, 5, 3]).run(|_, v| v[0].slice(1, 1, 3));
    let pad = Pad { dim: 1, before: 2, after: 1 };
    Check::new("pad").param("x", &[2, 3]).run(|b, v| b.apply(pad, &[v[0]]));
    Check::new("concat")
        .param("x", &[2, 1, 3])
        .param("y", &[2, 4, 3])
        .data("z", normal("z", &[2, 2, 3]))
        .run(|b, v| b.concat(v, 1));
}

#[test]
fn products_of_every_arrangement() {
    for (spec, a, b) in [
        ("ab,bc->ac", &[3, 4][..], &[4, 2][..]),
        ("ab,cb->ca", &[3, 4], &[2, 4]),
        ("abc,cd->abd", &[2, 3, 4], &[4, 2]),
        ("bshd,bthd->bhst", &[2, 3, 2, 2], &[2, 4, 2, 2]),
        ("bhst,bthd->bshd", &[2, 2, 3, 4], &[2, 4, 2, 3]),
        ("abc,abd->cd", &[2, 3, 4], &[2, 3, 2]),
        ("a,b->ba", &[3], &[2]),
        ("ab,ab->", &[3, 2], &[3, 2]),
        ("a,a->a", &[3], &[3]),
    ] {
        Check::new(spec).param("a", a).param("b", b).run(|_, v| v[0].einsum(v[1], spec));
    }
}

#[test]
fn a_product_with_an_addend() {
    let op = Matmul { spec: "ab,bc->ca".parse().unwrap(), out: DType::F64, add: true };
    Check::new("addend")
        .param("a", &[3, 4])
        .param("b", &[4, 2])
        .param("c", &[2, 3])
        .run(|b, v| b.apply(op, v));
}

/// A product of narrow operands with a wide result, as logits often are: its cotangent is wide,
/// and its gradients are products of narrow operands again.
#[test]
fn a_product_with_a_wider_result_has_gradients() {
    let b = Builder::new("widening", DType::F32);
    let (x, w) = (b.param("x", [2, 3]), b.param("w", [3, 2]));
    let op = Matmul { spec: "ab,bc->ac".parse().unwrap(), out: DType::F64, add: false };
    b.loss("loss", b.apply(op, &[x, w]).sum_all());
    let fbw = fbw(b, DType::F32);
    let single =
        |name: &str, shape: &[usize]| RefTensor::normal(DType::F32, shape, Stream::named(3, name));
    let (x, w) = (single("x", &[2, 3]), single("w", &[3, 2]));
    let outputs = run(&fbw, &[("x", x), ("w", w.clone())]).unwrap();
    let w = w.values();
    let expected: Vec<f64> =
        [0, 1, 2, 0, 1, 2].map(|row| f64::from((w[2 * row] + w[2 * row + 1]) as f32)).to_vec();
    assert_eq!(outputs[1].1.values(), expected);
}
