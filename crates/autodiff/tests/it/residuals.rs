//! What a layer keeps for its backward, in bytes, against the closed forms of docs/memory.md.

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{DType, Mesh};
use phalanx_models::{Architecture, BatchShape};
use phalanx_testing::{gpt, llama};

/// Bytes that the block of a model keeps, for 16-bit computation.
fn kept(architecture: &dyn Architecture, shape: BatchShape, recompute: Recompute) -> usize {
    let model = architecture.model(shape, DType::Bf16).unwrap();
    let phases = slice(&joint(model.program(1), DType::F32).unwrap(), recompute);
    let mesh = Mesh::single();
    let residuals = phases.residuals();
    residuals.iter().map(|(_, ty)| ty.local_bytes(&mesh)).sum()
}

const SHAPES: [BatchShape; 3] = [
    BatchShape { batch: 1, seq: 4 },
    BatchShape { batch: 2, seq: 5 },
    BatchShape { batch: 3, seq: 6 },
];

#[test]
fn a_gpt_layer() {
    for shape in SHAPES {
        for dropout in [0.0, 0.3] {
            let flash = gpt(AttentionKind::Flash, dropout);
            let (s, b, h, a) = (shape.seq, shape.batch, flash.spec.width, flash.spec.heads);
            assert_eq!(flash.spec.ffn, 4 * h, "the form is for an inner width of 4h");
            let statistics = 16 * s * b;
            let layer = 32 * s * b * h + statistics;
            let lse = 4 * a * s * b;
            assert_eq!(kept(&flash, shape, Recompute::None), layer + lse);
            assert_eq!(kept(&flash, shape, Recompute::Selective), layer + lse);
            assert_eq!(kept(&flash, shape, Recompute::Full), 2 * s * b * h);

            let materialised = gpt(AttentionKind::Materialised, dropout);
            let copies = if dropout > 0.0 { 2 } else { 1 };
            let quadratic = copies * 2 * a * s * s * b;
            assert_eq!(kept(&materialised, shape, Recompute::None), layer + quadratic);
            assert_eq!(kept(&materialised, shape, Recompute::Selective), layer);
            assert_eq!(kept(&materialised, shape, Recompute::Full), 2 * s * b * h);
        }
    }
}

#[test]
fn a_llama_layer() {
    for shape in SHAPES {
        let flash = llama(AttentionKind::Flash, false);
        let spec = &flash.spec;
        let (s, b, h, f, a) = (shape.seq, shape.batch, spec.width, spec.ffn, spec.heads);
        let (q, kv) = (a * spec.head_dim, spec.kv_heads * spec.head_dim);
        let layer = s * b * (8 * h + 4 * (q + kv) + 6 * f) + 8 * s * b;
        let lse = 4 * a * s * b;
        assert_eq!(kept(&flash, shape, Recompute::None), layer + lse);
        assert_eq!(kept(&flash, shape, Recompute::Selective), layer + lse);
        assert_eq!(kept(&flash, shape, Recompute::Full), 2 * s * b * h);

        let materialised = llama(AttentionKind::Materialised, false);
        let quadratic = 2 * a * s * s * b;
        assert_eq!(kept(&materialised, shape, Recompute::None), layer + quadratic);
        assert_eq!(kept(&materialised, shape, Recompute::Selective), layer);
        assert_eq!(kept(&materialised, shape, Recompute::Full), 2 * s * b * h);
    }
}
