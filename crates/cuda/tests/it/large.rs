//! Shapes that only a GPU computes in reasonable time, compared with other ways to compute them there.

use phalanx_call::Requirements;
use phalanx_cuda::CudaEngine;
use phalanx_engine::{Counters, Engine};
use phalanx_ir::ops::{Attention, AttentionGrad, AttentionKind, LinearCrossEntropy, Matmul};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Op};
use phalanx_reference::RefTensor;
use phalanx_testing::instances::apply;
use phalanx_testing::threads::furthest;

use crate::ops::on_gpu;
use crate::{gpu, ops};

/// The library's attention and ours, at the head widths of real models: the same numbers, as far as 16 bits
/// have them.
#[test]
fn attention_of_the_library_is_ours() {
    if !gpu::is_here("attention_of_the_library_is_ours") {
        return;
    }
    if let Some(why) = phalanx_cuda::without_attention_library() {
        eprintln!("SKIPPED attention_of_the_library_is_ours: {why}");
        return;
    }
    let mut library = CudaEngine::new().unwrap();
    let mut own = CudaEngine::new().unwrap().with_own_attention();
    let of = Attention { kind: AttentionKind::Flash, causal: true, dropout: 0.0, site: 1 };
    let sizes = [(64, 4, 4, 256), (128, 4, 2, 384), (64, 6, 3, 200)];
    let types = [DType::Bf16, DType::F16].into_iter();
    for (dtype, (width, heads, groups, len)) in types.flat_map(|of| sizes.map(|size| (of, size))) {
        let random = |name: &str, heads: usize| {
            RefTensor::normal(dtype, &[2, len, heads, width], Stream::named(11, name))
        };
        let (q, k, v) = (random("q", heads), random("k", groups), random("v", groups));
        let forward: Op = of.into();
        let operands = [q.clone(), k.clone(), v.clone()];
        let kept = on_gpu(&mut library, &forward, &operands, 0.0);
        let ours = on_gpu(&mut own, &forward, &operands, 0.0);
        let backward: Op = AttentionGrad { of }.into();
        let dy = random("dy", heads);
        let operands = [q, k, v, ours[0].clone(), ours[1].clone(), dy];
        let grads = on_gpu(&mut library, &backward, &operands, 0.0);
        let our_grads = on_gpu(&mut own, &backward, &operands, 0.0);
        let pairs = kept.iter().zip(&ours).chain(grads.iter().zip(&our_grads));
        for (i, (theirs, ours)) in pairs.enumerate() {
            let off = furthest(theirs, ours);
            assert!(
                off <= 2e-2,
                "{dtype}, width {width}, heads {heads}/{groups}: result {i} is off by {off:e}"
            );
        }
    }
}

/// Products of f32 round their operands to TF32 if they are asked to, and only then.
#[test]
fn tf32_rounds_the_operands_of_products() {
    if !gpu::is_here("tf32_rounds_the_operands_of_products") {
        return;
    }
    let spec = "ab,bc->ac".parse().unwrap();
    let op: Op = Matmul { spec, out: DType::F32, add: false }.into();
    let random = |name: &str| RefTensor::normal(DType::F32, &[512, 512], Stream::named(3, name));
    let operands = [random("a"), random("b")];
    let run = |tf32: bool| {
        let mut engine = CudaEngine::new().unwrap().with_tf32(tf32);
        on_gpu(&mut engine, &op, &operands, 0.0).swap_remove(0)
    };
    let expected = apply(&op, &operands).swap_remove(0);
    let (exact, rounded) = (furthest(&run(false), &expected), furthest(&run(true), &expected));
    assert!(exact <= 1e-5, "without rounding it is off by {exact:e}");
    assert!((1e-5..1e-2).contains(&rounded), "with rounding it is off by {rounded:e}");
}

/// A loss of so many rows that its logits do not fit into one chunk is that of its parts.
#[test]
fn a_loss_in_chunks_is_the_sum_of_its_parts() {
    if !gpu::is_here("a_loss_in_chunks_is_the_sum_of_its_parts") {
        return;
    }
    // A row of logits has 201 kB; a chunk of 1 GiB has about 5300 rows.
    let (rows, width, vocab, parts) = (12_000, 16, 50_304, 4);
    let op: Op = LinearCrossEntropy { transposed: true, chunk: 128, out: DType::F32 }.into();
    let x = RefTensor::normal(DType::F32, &[rows, width], Stream::named(5, "x"));
    let w = RefTensor::normal(DType::F32, &[vocab, width], Stream::named(5, "w"));
    let ids = RefTensor::ids(&[rows], vocab as u32, Stream::named(5, "ids"));
    let scale = RefTensor::scalar(DType::F32, 1.0 / rows as f64);
    let mut engine = CudaEngine::new().unwrap();
    let whole = [x.clone(), w.clone(), ids.clone(), scale.clone()];
    let whole = on_gpu(&mut engine, &op, &whole, 0.0);
    let (mut pieces, each) = (Vec::new(), rows / parts);
    let (of_x, of_ids) = (x.values(), ids.values());
    for part in 0..parts {
        let some = part * each..(part + 1) * each;
        let elements = some.start * width..some.end * width;
        let x = RefTensor::new(DType::F32, &[each, width], &of_x[elements]).unwrap();
        let ids = RefTensor::new(DType::I32, &[each], &of_ids[some]).unwrap();
        pieces.push(on_gpu(&mut engine, &op, &[x, w.clone(), ids, scale.clone()], 0.0));
    }
    for (i, whole) in whole.iter().enumerate() {
        let parts: Vec<Vec<f64>> = pieces.iter().map(|piece| piece[i].values()).collect();
        let joined = match parts[0].len() == whole.values().len() {
            // Of every row the same element: summed.
            true => (0..parts[0].len()).map(|at| parts.iter().map(|p| p[at]).sum()).collect(),
            false => parts.concat(),
        };
        let joined = RefTensor::new(DType::F32, whole.shape(), &joined).unwrap();
        let off = furthest(whole, &joined);
        assert!(off <= 1e-4, "result {i} is off by {off:e}");
    }
}

/// The workspaces of libraries are what the plan says before an engine is made.
#[test]
fn workspaces_are_as_planned() {
    if !gpu::is_here("workspaces_are_as_planned") {
        return;
    }
    let of = Attention { kind: AttentionKind::Flash, causal: true, dropout: 0.0, site: 1 };
    let normal =
        |name: &str, shape: &[usize]| RefTensor::normal(DType::Bf16, shape, Stream::named(5, name));
    let (q, k) = (normal("q", &[2, 128, 4, 64]), normal("k", &[2, 128, 2, 64]));
    let kept = apply(&of.into(), &[q.clone(), k.clone(), k.clone()]);
    let operands = [q.clone(), k.clone(), k, kept[0].clone(), kept[1].clone(), q];
    let (program, _) = phalanx_testing::instances::alone(&AttentionGrad { of }.into(), &operands);
    let mut engine = CudaEngine::new().unwrap();
    let planned = engine.requirements().beside(&program);
    ops::run(&mut engine, &program, &operands, 0.0);
    assert_eq!(engine.scratch_bytes(), planned);
    assert_eq!(phalanx_cuda::CudaRequirements::here().beside(&program), planned);
}
