//! Programs to rewrite: a transformer with its loss, plain reverse mode over it, and random graphs.

mod random;
mod reverse;

pub(crate) use random::random_program;
pub(crate) use reverse::{backward, joint};

use phalanx_ir::ops::{AttentionKind, RopeScaling, Rotary};
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Program, Tensor as Value, TensorType};
use phalanx_reference::{RefTensor, run};

const VOCAB: usize = 24;

/// An embedding, one LLaMA block and a head with its loss, in one program.
pub(crate) fn transformer(dtype: DType, tied: bool) -> Program {
    let b = Builder::new("transformer", dtype);
    let (ids, targets) = (b.data("ids", DType::I32, [2, 6]), b.data("targets", DType::I32, [2, 6]));
    let table = b.param("table", [VOCAB, 16]);
    let h = block(&b, table.embedding(ids));
    let logits = match tied {
        true => h.matmul_transposed(table),
        false => h.matmul(b.param("head", [16, VOCAB])),
    };
    let nll = logits.cross_entropy(targets);
    b.loss("loss", nll.sum_all() * b.scalar("inv_tokens"));
    b.finish().unwrap()
}

/// One LLaMA block between two boundaries.
pub(crate) fn block_program(dtype: DType) -> Program {
    let b = Builder::new("block", dtype);
    let h = b.boundary("h", [2, 6, 16]);
    b.output("out", block(&b, h));
    b.finish().unwrap()
}

fn block<'b>(b: &'b Builder, h: Value<'b>) -> Value<'b> {
    let rotary = Rotary { theta: 10000.0, scaling: RopeScaling::None, inverse: false };
    let heads = |x: Value<'b>| x.reshape([2, 6, 4, 4]);
    let x = h.rms_norm(b.param("norm1", [16]), 1e-5);
    let [q, k, v] = ["q", "k", "v"].map(|name| heads(x.matmul(b.param(name, [16, 16]))));
    let (q, k) = (q.rotary(rotary), k.rotary(rotary));
    let o = q.attention(k, v, AttentionKind::Flash, 0.0);
    let h = h + o.reshape([2, 6, 16]).matmul(b.param("o", [16, 16]));
    let x = h.rms_norm(b.param("norm2", [16]), 1e-5);
    let gate = x.matmul(b.param("gate", [16, 40])).silu();
    let inner = gate * x.matmul(b.param("up", [16, 40]));
    h + inner.matmul(b.param("down", [40, 16]))
}

/// The outputs of a program on random inputs, which depend on names and seed alone.
pub(crate) fn numbers(program: &Program, seed: u64) -> Vec<(String, RefTensor)> {
    let inputs: Vec<(&str, RefTensor)> = (program.inputs().iter())
        .map(|p| (p.name.as_str(), sample(program.ty(p.value), seed, &p.name)))
        .collect();
    run(program, &inputs).unwrap()
}

fn sample(ty: &TensorType, seed: u64, name: &str) -> RefTensor {
    let stream = Stream::named(seed, name);
    match ty.dtype {
        DType::I32 => RefTensor::ids(&ty.shape, VOCAB as u32, stream),
        dtype => RefTensor::normal(dtype, &ty.shape, stream),
    }
}

/// The largest difference between outputs, relative to the largest number of each.
pub(crate) fn distance(a: &[(String, RefTensor)], b: &[(String, RefTensor)]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut worst: f64 = 0.0;
    for ((name, x), (other, y)) in a.iter().zip(b) {
        assert_eq!((name, x.shape()), (other, y.shape()));
        let (x, y) = (x.values(), y.values());
        let size = x.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs()));
        for (x, y) in x.iter().zip(&y) {
            worst = worst.max(if x.to_bits() == y.to_bits() { 0.0 } else { (x - y).abs() / size });
        }
    }
    worst
}
