//! Compound ops give the same bits as the ops they stand for.

use phalanx_ir::ops::{
    Binary, BinaryKind, Broadcast, Cast, CrossEntropy, CrossEntropyGrad, Fused, FusedArg,
    FusedStep, LinearCrossEntropy, Matmul, Op, PackedMatmul, Scale, Spec, Unary, UnaryGrad,
    UnaryKind,
};
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Tensor as Value};
use phalanx_reference::RefTensor;
use phalanx_testing::ids;

use crate::support::eval;

fn normal(dtype: DType, name: &str, shape: &[usize]) -> RefTensor {
    RefTensor::normal(dtype, shape, Stream::named(31, name))
}

fn assert_same_bits(a: &[RefTensor], b: &[RefTensor]) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()));
        assert_eq!(a.to_bytes(), b.to_bytes(), "result {i}");
    }
}

#[test]
fn a_fused_group_is_its_steps() {
    use FusedArg::{Input, Step};
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        let wide = dtype.accumulator();
        let step = |op: Op, args: &[FusedArg], dtype| FusedStep { op, args: args.to_vec(), dtype };
        let mul = || Op::from(Binary { kind: BinaryKind::Mul });
        let kind = UnaryKind::Silu;
        let op = Fused {
            steps: vec![
                step(Unary { kind }.into(), &[Input(0)], dtype),
                step(mul(), &[Step(0), Input(1)], dtype),
                step(UnaryGrad { kind }.into(), &[Step(1), Input(0)], dtype),
                step(Cast { to: wide }.into(), &[Step(2)], wide),
                step(Scale { by: 0.3 }.into(), &[Step(3)], wide),
            ],
            results: vec![4, 1],
            full: 0,
        };
        let inputs = [("x", normal(dtype, "x", &[5, 4])), ("y", normal(dtype, "y", &[4]))];
        let fused = eval(&inputs, |b, v| b.apply_all(op, v));
        let apart = eval(&inputs, |b, v| {
            let product = v[0].silu() * v[1];
            let slope = b.apply(UnaryGrad { kind }, &[product, v[0]]);
            let wide = b.apply(Cast { to: wide }, &[slope]);
            vec![wide.scale(0.3), product]
        });
        assert_same_bits(&fused, &apart);
    }
}

#[test]
fn a_pack_is_its_products() {
    for out in [DType::F32, DType::Bf16] {
        let inputs = [
            ("x", normal(DType::Bf16, "x", &[2, 5, 4])),
            ("q", normal(DType::Bf16, "q", &[4, 6])),
            ("k", normal(DType::Bf16, "k", &[4, 3])),
        ];
        let spec: Spec = "bsd,de->bse".parse().unwrap();
        let packed = PackedMatmul { spec: spec.clone(), out };
        let packed = eval(&inputs, |b, v| b.apply_all(packed, v));
        let apart = eval(&inputs, |b, v| {
            let product = Matmul { spec, out, add: false };
            v[1..].iter().map(|&w| b.apply(product.clone(), &[v[0], w])).collect()
        });
        assert_same_bits(&packed, &apart);
    }
}

/// `matmul, cross_entropy, broadcast, cross_entropy_grad, matmul, matmul`.
fn apart<'b>(b: &'b Builder, v: &[Value<'b>], transposed: bool, out: DType) -> Vec<Value<'b>> {
    let [x, w, targets, dnll] = v[..] else {
        panic!("four operands");
    };
    let text = if transposed { "bsd,vd->bsv" } else { "bsd,dv->bsv" };
    let spec: Spec = text.parse().unwrap();
    let product = |spec: Spec, out: DType| Matmul { spec, out, add: false };
    let logits = b.apply(product(spec.clone(), x.dtype()), &[x, w]);
    let statistics = b.apply_all(CrossEntropy, &[logits, targets]);
    let spread = Broadcast { shape: targets.shape(), dims: vec![0, 1] };
    let dnll = b.apply(spread, &[dnll]);
    let dlogits = b.apply(CrossEntropyGrad, &[logits, targets, statistics[1], dnll]);
    let dx = b.apply(product(spec.grad_a(), x.dtype()), &[dlogits, w]);
    let dw = b.apply(product(spec.grad_b(), out), &[x, dlogits]);
    vec![statistics[0], dx, dw]
}

#[test]
fn linear_cross_entropy_is_its_composition() {
    // In 16 bit the logits stay wider inside the op than a program would store them.
    for dtype in [DType::F64, DType::F32] {
        for transposed in [false, true] {
            let w: &[usize] = if transposed { &[7, 4] } else { &[4, 7] };
            let out = dtype.accumulator();
            let targets = ids(&[2, 3], &[0, 6, -1, 3, 3, -7]);
            let inputs = [
                ("x", normal(dtype, "x", &[2, 3, 4])),
                ("w", normal(dtype, "w", w)),
                ("targets", targets),
                ("dnll", RefTensor::scalar(out, 0.25)),
            ];
            let op = LinearCrossEntropy { transposed, chunk: 4, out };
            let whole = eval(&inputs, |b, v| b.apply_all(op, v));
            let apart = eval(&inputs, |b, v| apart(b, v, transposed, out));
            assert_same_bits(&whole, &apart);
        }
    }
}
