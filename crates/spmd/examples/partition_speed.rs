//! How long the partitioner takes on the distinct segments of a large model.
#![allow(clippy::unwrap_used, reason = "an example that fails should stop")]

use std::time::Instant;

use phalanx_autodiff::joint;
use phalanx_ir::{DType, Mesh};
use phalanx_models::hf::{LlamaSpec, RopeScaling, RopeSpec};
use phalanx_models::{Architecture, BatchShape, Llama};
use phalanx_spmd::strategies::{AllGatherKv, BatchParallel, Megatron, Sequence};
use phalanx_spmd::{Costs, Strategy, apply, partition};

fn main() {
    let rope = RopeSpec { theta: 10000.0, scaling: RopeScaling::None };
    let spec = LlamaSpec {
        layers: 96,
        width: 2048,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        ffn: 5632,
        vocab: 32000,
        context: 4096,
        norm_eps: 1e-5,
        rope,
        tied: false,
    };
    let shape = BatchShape { batch: 64, seq: 4096 };
    let model = Llama::new(spec).model(shape, DType::Bf16).unwrap();
    let mesh: Mesh = "dp=16 cp=8 tp=8".parse().unwrap();
    let by: [&dyn Strategy; 4] = [
        &BatchParallel::default(),
        &AllGatherKv::default(),
        &Megatron::default(),
        &Sequence::default(),
    ];
    let start = Instant::now();
    let (mesh, annotations) = apply(&model, &mesh, &by).unwrap();
    println!("annotate {:?}", start.elapsed());
    for (forward, annotations) in model.segments().iter().zip(&annotations) {
        let whole = joint(forward, DType::F32).unwrap();
        let start = Instant::now();
        let parts = partition(&whole, &mesh, annotations, &Costs::default()).unwrap();
        let (before, after) = (whole.program.instrs().len(), parts.program.instrs().len());
        println!("{} {:?}: {before} -> {after} instructions", forward.name, start.elapsed());
    }
}
