//! Segments, strategies applied to them, and counts of collectives.

use std::collections::BTreeMap;

use phalanx_autodiff::{Joint, Phases, Recompute, joint, slice};
use phalanx_cost::Hardware;
use phalanx_ir::ops::{AttentionKind, Collective, CollectiveKind};
use phalanx_ir::{DType, Mesh, Model, Op, OpDef, Program};
use phalanx_models::hf::{GptSpec, LlamaSpec, RopeScaling, RopeSpec};
use phalanx_models::{Architecture, BatchShape, Gpt, Llama};
use phalanx_spmd::{Costs, Strategy, apply, partition};

pub(crate) const SHAPE: BatchShape = BatchShape { batch: 4, seq: 8 };

pub(crate) fn llama(kv_heads: usize) -> Model {
    let rope = RopeSpec { theta: 100.0, scaling: RopeScaling::None };
    let spec = LlamaSpec {
        layers: 1,
        width: 16,
        heads: 4,
        kv_heads,
        head_dim: 4,
        ffn: 32,
        vocab: 32,
        context: 16,
        norm_eps: 1e-5,
        rope,
        tied: false,
    };
    Llama { attention: AttentionKind::Flash, ..Llama::new(spec) }.model(SHAPE, DType::F64).unwrap()
}

pub(crate) fn gpt(dropout: f64) -> Model {
    let spec = GptSpec {
        layers: 1,
        width: 16,
        heads: 4,
        ffn: 64,
        vocab: 32,
        context: 8,
        norm_eps: 1e-5,
        tied: true,
    };
    Gpt { dropout, ..Gpt::new(spec) }.model(SHAPE, DType::F64).unwrap()
}

/// The partitioned joint graph of a segment.
pub(crate) fn split(model: &Model, segment: usize, mesh: &str, by: &[&dyn Strategy]) -> Joint {
    let mesh: Mesh = mesh.parse().unwrap();
    let (mesh, annotations) = apply(model, &mesh, by).unwrap();
    let whole = joint(&model.segments()[segment], DType::F64).unwrap();
    // At these toy sizes a usual latency would outweigh every byte.
    let hardware = Hardware { latency_s: 1e-12, ..Hardware::default() };
    let costs = Costs { hardware, memory_limit: None };
    partition(&whole, &mesh, &annotations[segment], &costs).unwrap()
}

pub(crate) fn phases(joint: &Joint) -> Phases {
    slice(joint, Recompute::None)
}

/// How often each collective that moves data occurs: `all_gather<tp> 2`.
pub(crate) fn count(program: &Program) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for instr in program.instrs() {
        let Op::Collective(Collective { kind, axes, .. }) = &instr.op else { continue };
        if matches!(kind, CollectiveKind::Shard { .. } | CollectiveKind::ToPartial) {
            continue;
        }
        let names: Vec<String> = axes.iter().map(ToString::to_string).collect();
        *counts.entry(format!("{}<{}>", instr.op.name(), names.join(","))).or_default() += 1;
    }
    let counts = counts.iter().map(|(name, n)| format!("{name} {n}"));
    counts.collect::<Vec<_>>().join(", ")
}
