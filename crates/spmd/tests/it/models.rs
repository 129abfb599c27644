//! Segments of real models under combinations of strategies, on simulated ranks.

use phalanx_autodiff::joint;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{DType, Mesh, Model};
use phalanx_models::{Architecture, BatchShape};
use phalanx_spmd::strategies::{AllGatherKv, BatchParallel, Megatron, Sequence, Ulysses};
use phalanx_spmd::{Costs, Strategy, apply, partition};
use phalanx_testing::checks::on_simulated_ranks;
use phalanx_testing::{gpt, llama, mlp};

fn check(model: &Model, mesh: &str, by: &[&dyn Strategy]) {
    let mesh: Mesh = mesh.parse().unwrap();
    let (mesh, annotations) = apply(model, &mesh, by).unwrap();
    for (forward, annotations) in model.segments().iter().zip(&annotations) {
        let whole = joint(forward, DType::F64).unwrap();
        let parts = partition(&whole, &mesh, annotations, &Costs::default()).unwrap();
        on_simulated_ranks(&whole, &parts, 7).unwrap();
    }
}

/// The small models have 11 words, 5 positions here, and 2 key heads for 4 heads: little divides.
#[test]
fn every_combination_equals_one_rank() {
    let shape = BatchShape { batch: 4, seq: 5 };
    let (data, tp, sp) = (BatchParallel::default(), Megatron::default(), Sequence::default());
    let (ulysses, kv) = (Ulysses::default(), AllGatherKv::default());
    let sets: [(&str, Vec<&dyn Strategy>); 7] = [
        ("dp=2 tp=2", vec![&data, &tp]),
        ("dp=2 tp=2", vec![&sp, &tp, &data]),
        ("tp=4", vec![&tp, &sp]),
        ("dp=2 cp=2", vec![&data, &ulysses]),
        ("cp=2 tp=2", vec![&tp, &ulysses, &sp]),
        ("dp=2 cp=2 tp=2", vec![&data, &kv, &tp, &sp]),
        ("dp=2 cp=2 tp=2", vec![&data, &ulysses, &tp]),
    ];
    for kind in [AttentionKind::Flash, AttentionKind::Materialised] {
        for tied in [false, true] {
            let model = llama(kind, tied).model(shape, DType::F64).unwrap();
            for (mesh, by) in &sets {
                check(&model, mesh, by);
            }
        }
    }
    for dropout in [0.0, 0.3] {
        let model = gpt(AttentionKind::Flash, dropout).model(shape, DType::F64).unwrap();
        for (mesh, by) in sets.iter().filter(|(mesh, _)| !mesh.contains("cp") && *mesh != "tp=4") {
            check(&model, mesh, by);
        }
        check(&model, "dp=2 cp=2", &[&data, &kv]);
    }
    let model = mlp().model(shape, DType::F64).unwrap();
    check(&model, "dp=2 tp=2", &[&data, &tp]);
    check(&model, "dp=3", &[&data]);
}
