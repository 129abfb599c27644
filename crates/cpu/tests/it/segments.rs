//! Whole segments with their backward, before and after the passes.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, Recompute, joint, slice};
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{DType, Program};
use phalanx_models::hf::{GptSpec, LlamaSpec, RopeScaling, RopeSpec};
use phalanx_models::{Architecture, BatchShape, Gpt, Llama};

use crate::harness::{check, inputs, on_cpu, on_own_products, tolerance};

fn llama() -> Llama {
    Llama::new(LlamaSpec {
        layers: 1,
        width: 24,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn: 40,
        vocab: 10,
        context: 8,
        norm_eps: 1e-5,
        rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        tied: true,
    })
}

fn gpt() -> Gpt {
    let spec = GptSpec {
        layers: 1,
        width: 24,
        heads: 4,
        ffn: 40,
        vocab: 10,
        context: 8,
        norm_eps: 1e-5,
        tied: true,
    };
    Gpt { dropout: 0.1, attention: AttentionKind::Materialised, ..Gpt::new(spec) }
}

fn segments(dtype: DType) -> Vec<Program> {
    let shape = BatchShape { batch: 4, seq: 8 };
    let models = [llama().model(shape, dtype).unwrap(), gpt().model(shape, dtype).unwrap()];
    models.iter().flat_map(|m| m.segments().to_vec()).collect()
}

#[test]
fn forward_and_backward_of_every_segment() {
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        for segment in segments(dtype) {
            let whole = joint(&segment, dtype.accumulator()).unwrap();
            let fbw = slice(&whole, Recompute::None).fbw;
            check(&fbw, 10, 4.0 * tolerance(dtype));
            let folded = phalanx_passes::fold_add(&phalanx_passes::common(&fbw));
            let fused = phalanx_passes::fuse(&folded);
            check(&fused, 10, 4.0 * tolerance(dtype));
            let chunked = phalanx_passes::chunk_loss(&fbw, NonZeroUsize::new(10).unwrap());
            check(&phalanx_passes::fuse(&chunked), 10, 4.0 * tolerance(dtype));
        }
    }
}

/// However many threads share packed operands and cut results, with one more than there are sequences, and
/// with far more.
#[test]
fn own_products_have_the_same_bits_on_any_number_of_threads() {
    for dtype in [DType::F32, DType::Bf16] {
        for segment in segments(dtype) {
            let whole = joint(&segment, DType::F32).unwrap();
            let fbw = slice(&whole, Recompute::None).fbw;
            let chunked = phalanx_passes::chunk_loss(&fbw, NonZeroUsize::new(10).unwrap());
            let program = phalanx_passes::pack(&phalanx_passes::fold_add(&chunked));
            let data = inputs(&program, 10, 3);
            let alone = on_own_products(&program, &data, 1, None);
            for threads in [2, 3, 4, 5, 8, 16] {
                let shared = on_own_products(&program, &data, threads, None);
                assert!(shared == alone, "{threads} threads: {program}");
            }
        }
    }
}

/// Fusion changes no bits, and recomputation changes none either.
#[test]
fn fused_and_recomputed_programs_give_the_same_bits() {
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        for segment in segments(dtype) {
            let whole = joint(&segment, dtype.accumulator()).unwrap();
            let folded = Joint::from(phalanx_passes::fold_add(&whole.program));
            let plain = slice(&folded, Recompute::None);
            let data = inputs(&plain.f, 10, 3);
            let f = on_cpu(&plain.f, &data, 2, None);
            let fused = on_cpu(&phalanx_passes::fuse(&plain.f), &data, 2, None);
            assert!(f == fused, "{}", plain.f);
            let mut results = Vec::new();
            for recompute in Recompute::ALL {
                let phases = slice(&folded, recompute);
                let data = inputs(&phases.f, 10, 3);
                let kept = on_cpu(&phalanx_passes::fuse(&phases.f), &data, 2, None);
                let mut given = data.clone();
                let ports = phases.f.outputs().iter().map(|p| p.name.clone());
                given.extend(ports.zip(kept));
                let mut wanted = inputs(&phases.bw, 10, 3);
                for (name, tensor) in &mut wanted {
                    // A boundary input keeps its own value; residuals come from F.
                    if let Some((_, found)) = given.iter().find(|(n, _)| n == name) {
                        *tensor = found.clone();
                    }
                }
                results.push(on_cpu(&phalanx_passes::fuse(&phases.bw), &wanted, 2, None));
            }
            for other in &results[1..] {
                for (a, b) in results[0].iter().zip(other) {
                    assert!(a == b, "{}", segment.name);
                }
            }
        }
    }
}
