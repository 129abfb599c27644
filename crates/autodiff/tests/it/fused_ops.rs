//! Gradients of the ops that fuse several steps: norms, rotary, attention, softmax, losses.

use phalanx_ir::ops::{Attention, AttentionKind, Queue, RopeScaling, Rotary};
use phalanx_ir::random::Stream;
use phalanx_reference::RefTensor;
use phalanx_testing::ids;

use crate::check::Check;

fn key() -> RefTensor {
    ids(&[5], &[12, 34, 5, 6, 7])
}

#[test]
fn embeddings_add_up_repeated_ids() {
    Check::new("embedding")
        .param("table", &[5, 3])
        .data("ids", ids(&[2, 3], &[4, 0, 2, 2, 2, 4]))
        .run(|_, v| v[0].embedding(v[1]));
}

#[test]
fn norms() {
    for shape in [&[6][..], &[3, 6], &[2, 2, 6]] {
        Check::new(format!("rms norm {shape:?}"))
            .param("x", shape)
            .param("gain", &[6])
            .run(|_, v| v[0].rms_norm(v[1], 1e-3));
        Check::new(format!("layer norm {shape:?}"))
            .param("x", shape)
            .param("gain", &[6])
            .param("bias", &[6])
            .run(|_, v| v[0].layer_norm(v[1], v[2], 1e-3));
    }
}

#[test]
fn rotary_with_each_scaling() {
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }, llama3] {
        for inverse in [false, true] {
            let rotary = Rotary { theta: 100.0, scaling, inverse };
            Check::new(format!("rotary {scaling} {inverse}"))
                .param("x", &[2, 3, 2, 8])
                .run(|_, v| v[0].rotary(rotary));
        }
    }
}

#[test]
fn attentions_with_grouped_heads_masks_and_dropout() {
    for kind in [AttentionKind::Flash, AttentionKind::Materialised] {
        for causal in [false, true] {
            for dropout in [0.0, 0.4] {
                // Heads equal, grouped, all on one; sequences equal, more keys, more queries.
                for (h, g, s, t) in [(2, 2, 3, 3), (4, 2, 2, 4), (2, 1, 4, 2)] {
                    let op = Attention { kind, causal, dropout, site: 3 };
                    let mut check = Check::new(format!("{op:?} {h} {g} {s} {t}"))
                        .param("q", &[2, s, h, 2])
                        .param("k", &[2, t, g, 2])
                        .param("v", &[2, t, g, 2]);
                    if op.drops() {
                        check = check.data("key", key());
                    }
                    check.run(|b, v| b.apply(op, v));
                }
            }
        }
    }
}

#[test]
fn softmaxes() {
    Check::new("softmax").param("x", &[3, 5]).run(|_, v| v[0].softmax());
}

#[test]
fn dropouts() {
    Check::new("dropout").param("x", &[4, 5]).data("key", key()).run(|_, v| v[0].dropout(0.4));
}

#[test]
fn cross_entropies_with_ignored_targets() {
    Check::new("cross entropy")
        .param("logits", &[2, 3, 5])
        .data("targets", ids(&[2, 3], &[0, 4, -1, 2, -100, 2]))
        .run(|_, v| v[0].cross_entropy(v[1]));
}

/// A whole block: what the ops give together, with a weight used twice.
#[test]
fn a_small_model() {
    let tokens = RefTensor::ids(&[2, 4], 7, Stream::named(5, "tokens"));
    let targets = RefTensor::ids(&[2, 4], 7, Stream::named(5, "targets"));
    Check::new("model")
        .param("table", &[7, 4])
        .param("gain", &[4])
        .param("q", &[4, 4])
        .param("kv", &[4, 2])
        .param("up", &[4, 6])
        .param("down", &[6, 4])
        .data("tokens", tokens)
        .data("targets", targets)
        .data("key", key())
        .run(|_, v| {
            let rotary = Rotary { theta: 10.0, scaling: RopeScaling::None, inverse: false };
            let h = v[0].embedding(v[6]);
            let x = h.rms_norm(v[1], 1e-5);
            let q = x.matmul(v[2]).reshape([2, 4, 2, 2]).rotary(rotary);
            let k = x.matmul(v[3]).reshape([2, 4, 1, 2]).rotary(rotary);
            let o = q.attention(k, k, AttentionKind::Flash, 0.2);
            let h = h + o.reshape([2, 4, 4]);
            let h = h + x.matmul(v[4]).gelu().matmul(v[5]).dropout(0.2);
            h.matmul_transposed(v[0]).cross_entropy(v[7])
        });
}

/// Choices change in jumps, so they are data here; what they choose has slopes.
#[test]
fn choices_and_rows_of_experts() {
    let index = ids(&[2, 3, 2], &[0, 1, 0, 1, 0, 2, 1, 0, 2, 0, 2, 1]);
    Check::new("top k").param("x", &[2, 3, 4]).run(|_, v| v[0].top_k(2).0);
    // The third token finds no place at its first expert.
    Check::new("to experts and back")
        .param("x", &[2, 3, 4])
        .param("gates", &[2, 3, 2])
        .data("index", index)
        .run(|_, v| {
            let slot = v[2].assign(3, 2, None);
            v[0].dispatch(slot, 3, 2).silu().combine(slot, v[1])
        });
    // Both parts of the experts; the second group's first expert has no row.
    Check::new("packed rows of experts")
        .param("x", &[2, 3, 4])
        .param("gates", &[2, 3, 2])
        .param("up", &[4, 4, 3])
        .param("down", &[4, 3, 4])
        .data("index", ids(&[2, 3, 2], &[0, 1, 0, 3, 3, 2, 1, 2, 2, 1, 2, 3]))
        .run(|_, v| {
            let of = Queue::worst(4, 2, [3, 2]);
            let (rows, slot, counts) = v[0].queue(v[4], of, None);
            let inner = rows.grouped_matmul(v[2], counts).silu();
            inner.grouped_matmul(v[3], counts).combine(slot, v[1])
        });
}
