//! Every op, alone.

use phalanx_ir::ops::{
    Attention, AttentionGrad, AttentionKind, BinaryKind, Bounds, CompareKind, EmbeddingGrad,
    LayerNormGrad, LinearCrossEntropy, MemberScale, MemberSquares, NoiseKind, PackedMatmul, Pad,
    RmsNormGrad, RopeScaling, Rotary, SoftmaxGrad, SumSquares, UnaryGrad, UnaryKind,
};
use phalanx_ir::{Builder, DType, Role, Tensor, TensorType};

use crate::harness::{check, inputs, on_cpu, on_own_products, tolerance};

const FLOATS: [DType; 3] = [DType::F64, DType::F32, DType::Bf16];

/// Builds a program for each float type and checks it.
pub(crate) fn each(name: &str, build: impl for<'b> Fn(&'b Builder, DType)) {
    for dtype in FLOATS {
        let b = Builder::new(name, dtype);
        build(&b, dtype);
        check(&b.finish().unwrap(), 10, tolerance(dtype));
    }
}

pub(crate) fn gradient<'b>(b: &'b Builder, name: &str, value: Tensor<'b>) {
    b.port(name, Role::Gradient, value);
}

#[test]
fn products_of_every_arrangement() {
    for spec in [
        "bsd,de->bse",
        "bse,de->bsd",
        "bsd,bse->de",
        "bsd,ed->bse",
        "bshd,bthd->bhst",
        "bhst,bthd->bshd",
        "ab,bc->ac",
        "ba,bc->ac",
        "ab,cb->ac",
        "ab,bc->ca",
        "abc,abd->cd",
    ] {
        each(spec, |b, dtype| {
            let size = |c: char| 3 + (c as usize * 7) % 11;
            let (left, _) = spec.split_once("->").unwrap();
            let (x, y) = left.split_once(',').unwrap();
            let shape = |s: &str| s.chars().map(size).collect::<Vec<_>>();
            let x = b.input("x", Role::Data, TensorType::new(dtype, shape(x)));
            let y = b.input("y", Role::Data, TensorType::new(dtype, shape(y)));
            gradient(b, "z", x.einsum(y, spec));
        });
    }
}

/// Widths of their own, one of them a single column; a letter that can't be merged; a batch.
#[test]
fn packed_products_of_every_arrangement() {
    for spec in ["bsd,de->bse", "bsd,bse->de", "abc,cbe->ae", "bshd,bthd->bhst", "ab,bc->ca"] {
        each(spec, |b, dtype| {
            let (left, _) = spec.split_once("->").unwrap();
            let (x, y) = left.split_once(',').unwrap();
            let own = |c: char| y.contains(c) && !x.contains(c);
            let shape = |s: &str, width: usize| -> Vec<usize> {
                let size = |c: char| if own(c) { width } else { 3 + (c as usize * 7) % 11 };
                s.chars().map(size).collect()
            };
            let input = |name: &str, shape: Vec<usize>| {
                b.input(name, Role::Data, TensorType::new(dtype, shape))
            };
            let mut operands = vec![input("x", shape(x, 0))];
            for width in [7, 1, 20] {
                operands.push(input(&format!("y{width}"), shape(y, width)));
            }
            let packed = PackedMatmul { spec: spec.parse().unwrap(), out: dtype };
            for (i, value) in b.apply_all(packed, &operands).into_iter().enumerate() {
                gradient(b, &format!("z{i}"), value);
            }
        });
    }
}

/// Sizes above a block of the inner dimension and below, on both sides of every threshold of the
/// matrix library.
#[test]
fn a_packed_product_has_the_bits_of_the_product_alone() {
    for (dtype, out) in
        [(DType::F32, DType::F32), (DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)]
    {
        for (rows, width) in [(3, 40), (700, 5), (1100, 70), (513, 130)] {
            let sizes = [1, 40, 150];
            let build = |packed: bool| {
                let b = Builder::new("products", dtype);
                let input = |name: &str, shape: [usize; 2]| {
                    b.input(name, Role::Data, TensorType::new(dtype, shape.to_vec()))
                };
                let (x, w) =
                    (input("x", [rows, width]), |n: usize| input(&format!("w{n}"), [width, n]));
                let forward: Vec<Tensor<'_>> = sizes.iter().map(|&n| w(n)).collect();
                let y = |n: usize| input(&format!("y{n}"), [rows, n]);
                let backward: Vec<Tensor<'_>> = sizes.iter().map(|&n| y(n)).collect();
                for (name, spec, others) in
                    [("f", "rd,de->re", forward), ("w", "rd,re->de", backward)]
                {
                    let op = PackedMatmul { spec: spec.parse().unwrap(), out };
                    let made = if packed {
                        b.apply_all(op, &[vec![x], others].concat())
                    } else {
                        others.iter().map(|&o| b.apply(op.single(), &[x, o])).collect()
                    };
                    for (i, value) in made.into_iter().enumerate() {
                        gradient(&b, &format!("{name}{i}"), value);
                    }
                }
                b.finish().unwrap()
            };
            let (packed, alone) = (build(true), build(false));
            let inputs = inputs(&packed, 2, 5);
            for threads in [1, 2] {
                for run in [on_cpu, on_own_products] {
                    let got = run(&packed, &inputs, threads, None);
                    let expected = run(&alone, &inputs, threads, None);
                    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        let same = got.to_bytes() == expected.to_bytes();
                        assert!(same, "{dtype} {out} {rows}×{width}, {threads} threads, {i}");
                    }
                }
            }
        }
    }
}

/// The sides of a gradient that four, seven and sixteen workers cut in two directions.
#[test]
fn own_products_have_the_same_bits_on_any_number_of_threads() {
    for out in [DType::F32, DType::Bf16] {
        let b = Builder::new("products", DType::Bf16);
        let x = b.data("x", DType::Bf16, [90, 70]);
        let y = b.data("y", DType::Bf16, [90, 200]);
        let w = b.param("w", [70, 200]);
        for (name, spec, operands) in
            [("f", "rd,de->re", [x, w]), ("dx", "re,de->rd", [y, w]), ("dw", "rd,re->de", [x, y])]
        {
            let op = phalanx_ir::ops::Matmul { spec: spec.parse().unwrap(), out, add: false };
            gradient(&b, name, b.apply(op, &operands));
        }
        let program = b.finish().unwrap();
        let inputs = inputs(&program, 2, 5);
        let alone = on_own_products(&program, &inputs, 1, None);
        for threads in [2, 4, 7, 16] {
            let got = on_own_products(&program, &inputs, threads, None);
            let same = got.iter().zip(&alone).all(|(x, y)| x.to_bytes() == y.to_bytes());
            assert!(same, "{out}, {threads} threads");
        }
    }
}

#[test]
fn products_with_addends() {
    each("addend", |b, dtype| {
        let x = b.data("x", dtype, [6, 8]);
        let w = b.param("w", [8, 5]);
        let spec = "ab,bc->ac".parse().unwrap();
        let op = phalanx_ir::ops::Matmul { spec, out: dtype, add: true };
        let c = b.data("c", dtype, [6, 5]);
        b.output("kept", b.apply(op.clone(), &[x, w, c]));
        let own = c.scale(2.0);
        b.output("in_place", b.apply(op, &[x, w, own]));
    });
}

#[test]
fn elementwise_functions() {
    for kind in UnaryKind::ALL {
        each("unary", |b, dtype| {
            let x = b.data("x", dtype, [5, 300]);
            // Logarithms and roots need positive arguments.
            let x = x.square().shift(0.1);
            b.output("y", x.unary(kind));
            let dy = b.data("dy", dtype, [5, 300]);
            gradient(b, "dx", b.apply(UnaryGrad { kind }, &[x, dy]));
        });
    }
}

#[test]
fn binary_functions_and_repetition() {
    for kind in BinaryKind::ALL {
        each("binary", |b, dtype| {
            let op = phalanx_ir::ops::Binary { kind };
            let x = b.data("x", dtype, [7, 3, 70]);
            for (name, shape) in [("full", vec![7, 3, 70]), ("row", vec![70]), ("two", vec![3, 70])]
            {
                let y =
                    b.input(name, Role::Data, TensorType::new(dtype, shape)).square().shift(0.5);
                b.output(&format!("of_{name}"), b.apply(op, &[x, y]));
            }
            let one = b.input("one", Role::Data, TensorType::new(dtype, [])).square().shift(0.5);
            gradient(b, "of_one", b.apply(op, &[x, one]));
        });
    }
}

#[test]
fn comparisons_selections_and_casts() {
    each("compare", |b, dtype| {
        let (x, y) = (b.data("x", dtype, [40, 9]), b.data("y", dtype, [40, 9]));
        for kind in CompareKind::ALL {
            b.output(&format!("{kind:?}"), x.compare(kind, y).select(x, y.scale(3.0)));
        }
        for to in [DType::F64, DType::F32, DType::Bf16, DType::I32, DType::Bool] {
            b.output(&format!("as_{to}"), x.scale(3.0).cast(to));
        }
    });
}

#[test]
fn reductions_and_repetitions() {
    each("reduce", |b, dtype| {
        let x = b.data("x", dtype, [4, 5, 6]);
        for dims in [vec![0], vec![1], vec![2], vec![0, 1], vec![1, 2], vec![0, 2], vec![0, 1, 2]] {
            gradient(b, &format!("sum{dims:?}"), x.sum(&dims));
            b.output(&format!("max{dims:?}"), x.max_over(&dims));
        }
        b.output("spread", b.data("y", dtype, [4, 6]).broadcast([4, 5, 6], &[1]));
        gradient(b, "squares", b.apply(SumSquares, &[x]));
    });
}

#[test]
fn movements() {
    each("move", |b, dtype| {
        let x = b.data("x", dtype, [4, 30, 6]);
        b.output("t1", x.transpose(&[2, 0, 1]));
        b.output("t2", x.transpose(&[1, 0, 2]));
        b.output("s1", x.slice(1, 3, 20));
        b.output("s2", x.slice(2, 1, 4));
        gradient(b, "c", b.concat(&[x, x.scale(2.0)], 1));
        b.output("p", b.apply(Pad { dim: 1, before: 2, after: 3 }, &[x]));
        b.output("r", x.reshape([24, 30]));
        b.output("f", b.constant(dtype, [300, 2], 1.5));
    });
}

#[test]
fn norms() {
    each("norms", |b, dtype| {
        let (x, g, c) = (b.data("x", dtype, [4, 10, 24]), b.param("g", [24]), b.param("c", [24]));
        let dy = b.data("dy", dtype, [4, 10, 24]);
        let rms = b.apply_all(phalanx_ir::ops::RmsNorm { eps: 1e-5 }, &[x, g]);
        b.output("y", rms[0]);
        let grads = b.apply_all(RmsNormGrad { out: dtype }, &[x, g, rms[1], dy]);
        gradient(b, "dx", grads[0]);
        gradient(b, "dg", grads[1]);
        let layer = b.apply_all(phalanx_ir::ops::LayerNorm { eps: 1e-5 }, &[x, g, c]);
        b.output("z", layer[0]);
        let grads = b.apply_all(LayerNormGrad { out: dtype }, &[x, g, layer[1], layer[2], dy]);
        for (name, value) in ["dx2", "dg2", "dc2"].into_iter().zip(grads) {
            gradient(b, name, value);
        }
    });
}

#[test]
fn rotations_softmax_and_dropout() {
    each("rows", |b, dtype| {
        let x = b.data("x", dtype, [3, 7, 2, 6]);
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16.0 };
        let rotary = Rotary { theta: 100.0, scaling, inverse: false };
        b.output("turned", x.rotary(rotary));
        b.output("in_place", x.scale(0.5).rotary(Rotary { inverse: true, ..rotary }));
        let y = x.softmax();
        b.output("y", y);
        gradient(b, "dx", b.apply(SoftmaxGrad, &[y, x]));
        b.output("dropped", x.dropout(0.3));
        for kind in NoiseKind::ALL {
            b.output(&format!("{kind:?}"), x.noise(kind));
        }
    });
}

#[test]
fn embeddings() {
    each("embedding", |b, dtype| {
        let table = b.param("table", [10, 12]);
        let ids = b.data("ids", DType::I32, [4, 9]);
        b.output("rows", table.embedding(ids));
        let dy = b.data("dy", dtype, [4, 9, 12]);
        gradient(b, "dtable", b.apply(EmbeddingGrad { vocab: 10, out: dtype }, &[ids, dy]));
    });
}

#[test]
fn attention_of_every_kind() {
    let kinds = [AttentionKind::Flash, AttentionKind::Materialised];
    for (kind, dropout, causal) in
        kinds.into_iter().flat_map(|k| [(k, 0.0, true), (k, 0.2, true), (k, 0.0, false)])
    {
        each("attention", |b, dtype| {
            let (batch, s, heads, groups, d) = (3, 11, 4, 2, 6);
            let q = b.data("q", dtype, [batch, s, heads, d]);
            let k = b.data("k", dtype, [batch, s, groups, d]);
            let v = b.data("v", dtype, [batch, s, groups, d]);
            let op = Attention { kind, causal, dropout, site: 5 };
            let key = if op.drops() { vec![b.key()] } else { vec![] };
            let results = b.apply_all(op, &[&[q, k, v][..], &key].concat());
            b.output("o", results[0]);
            let kept = match (kind, op.drops()) {
                (AttentionKind::Flash, _) | (AttentionKind::Materialised, false) => 0..2,
                (AttentionKind::Materialised, true) => 0..3,
            };
            let d_o = b.data("do", dtype, [batch, s, heads, d]);
            let operands = [&[q, k, v][..], &results[kept], &[d_o], &key].concat();
            let grads = b.apply_all(AttentionGrad { of: op }, &operands);
            for (name, value) in ["dq", "dk", "dv"].into_iter().zip(grads) {
                gradient(b, name, value);
            }
        });
    }
}

#[test]
fn losses() {
    each("losses", |b, dtype| {
        let x = b.data("x", dtype, [4, 6, 8]);
        let w = b.param("w", [8, 10]);
        let targets = b.data("targets", DType::I32, [4, 6]);
        let results = b.apply_all(phalanx_ir::ops::CrossEntropy, &[x.matmul(w), targets]);
        b.output("nll", results[0]);
        let fused = |transposed| LinearCrossEntropy { transposed, chunk: 7, out: dtype };
        let scale = b.scalar("scale");
        let plain = b.apply_all(fused(false), &[x, w, targets, scale]);
        let tied = b.param("tied", [10, 8]);
        let other = b.apply_all(fused(true), &[x, tied, targets, scale]);
        for (suffix, r) in [("plain", plain), ("tied", other)] {
            b.output(&format!("nll_{suffix}"), r[0]);
            b.output(&format!("dx_{suffix}"), r[1]);
            gradient(b, &format!("dw_{suffix}"), r[2]);
        }
    });
}

/// Of a unit that dies, which is scaled where it lies, and of one that stays; the same bits for any
/// number of threads.
#[test]
fn members_of_units() {
    each("members", |b, dtype| {
        let bounds = Bounds { members: vec![(0, 300), (320, 321), (352, 1000)], block: 1024 };
        let x = b.input("x", Role::State, TensorType::unit(dtype, 2048));
        let factors = b.input("factors", Role::State, TensorType::new(dtype.accumulator(), [3]));
        let scale = MemberScale { bounds: bounds.clone() };
        b.port("scaled", Role::State, b.apply(scale.clone(), &[x, factors]));
        b.port("in_place", Role::State, b.apply(scale, &[x.scale(0.5), factors]).scale(2.0));
        gradient(b, "squares", b.apply(MemberSquares { bounds }, &[x]));
    });
    let b = Builder::new("squares", DType::F32);
    let x = b.input("x", Role::State, TensorType::unit(DType::F32, 4096));
    let bounds = Bounds { members: vec![(0, 1500), (1504, 1601), (2000, 4096)], block: 4096 };
    b.probe("squares", b.apply(MemberSquares { bounds }, &[x]));
    let program = b.finish().unwrap();
    let given = inputs(&program, 0, 3);
    let alone = on_cpu(&program, &given, 1, None);
    for threads in 2..6 {
        assert_eq!(on_cpu(&program, &given, threads, None), alone, "{threads} threads");
    }
}
