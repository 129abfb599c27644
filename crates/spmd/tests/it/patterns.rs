//! The published communication patterns, as counts of collectives per phase.

use std::collections::BTreeMap;

use phalanx_autodiff::joint;
use phalanx_ir::{Builder, DType, Mesh, Port, Role};
use phalanx_models::{Architecture, BatchShape};
use phalanx_spmd::strategies::{AllGatherKv, BatchParallel, Megatron, Sequence, Ulysses};
use phalanx_spmd::{Annotator, Costs, SpmdError, Strategy, apply, partition};
use phalanx_testing::mlp;

use crate::support::{count, gpt, llama, phases, split};

fn check(
    model: &phalanx_ir::Model,
    segment: usize,
    mesh: &str,
    by: &[&dyn Strategy],
    f: &str,
    bw: &str,
) {
    let joint = split(model, segment, mesh, by);
    let programs = phases(&joint);
    assert_eq!(
        (count(&programs.f).as_str(), count(&programs.bw).as_str()),
        (f, bw),
        "\n{}",
        joint.program
    );
}

#[test]
fn tensor_parallel_block() {
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &Megatron::default()];
    check(&llama(4), 1, "dp=2 tp=2", &by, "all_reduce<tp> 2", "all_reduce<tp> 2");
    check(&gpt(0.1), 1, "dp=2 tp=2", &by, "all_reduce<tp> 2", "all_reduce<tp> 2");
}

#[test]
fn tensor_parallel_ends() {
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &Megatron::default()];
    check(&llama(4), 0, "dp=2 tp=2", &by, "all_reduce<tp> 1", "");
    check(&llama(4), 2, "dp=2 tp=2", &by, "all_reduce<dp> 1", "all_reduce<tp> 1");
    check(&gpt(0.1), 0, "dp=2 tp=2", &by, "all_reduce<tp> 1", "");
    check(&gpt(0.1), 2, "dp=2 tp=2", &by, "all_reduce<dp> 1", "all_reduce<tp> 1");
}

#[test]
fn sequence_parallel_block() {
    let by: [&dyn Strategy; 3] =
        [&BatchParallel::default(), &Megatron::default(), &Sequence::default()];
    let f = "all_gather<tp> 2, reduce_scatter<tp> 2";
    let bw = "all_gather<tp> 4, reduce_scatter<tp> 2";
    check(&llama(4), 1, "dp=2 tp=2", &by, f, bw);
    check(&gpt(0.1), 1, "dp=2 tp=2", &by, f, bw);
}

#[test]
fn ulysses_block() {
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &Ulysses::default()];
    check(&llama(4), 1, "dp=2 cp=2", &by, "all_to_all<cp> 4", "all_to_all<cp> 4");
}

#[test]
fn ulysses_with_tensor_parallelism() {
    let by: [&dyn Strategy; 3] =
        [&BatchParallel::default(), &Megatron::default(), &Ulysses::default()];
    let each = "all_reduce<tp> 2, all_to_all<cp> 4";
    check(&llama(4), 1, "dp=2 cp=2 tp=2", &by, each, each);
}

#[test]
fn context_parallel_block() {
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &AllGatherKv::default()];
    check(
        &llama(4),
        1,
        "dp=2 cp=2",
        &by,
        "all_gather<cp> 2",
        "all_gather<cp> 2, reduce_scatter<cp> 2",
    );
}

#[test]
fn few_key_heads_need_no_further_reduction() {
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &Megatron::default()];
    check(&llama(2), 1, "dp=2 tp=4", &by, "all_reduce<tp.0,tp.1> 2", "all_reduce<tp.0,tp.1> 2");
}

#[test]
fn ulysses_with_few_key_heads() {
    let by: [&dyn Strategy; 1] = [&Ulysses::default()];
    // Keys and values lie on the major half of the axis, so each is gathered over the minor one.
    let f = "all_gather<cp.1> 2, all_to_all<cp.0,cp.1> 2, all_to_all<cp.0> 2";
    let bw = "all_to_all<cp.0,cp.1> 2, all_to_all<cp.0> 2, reduce_scatter<cp.1> 2";
    check(&llama(2), 1, "cp=4", &by, f, bw);
    let by: [&dyn Strategy; 2] = [&Megatron::default(), &Ulysses::default()];
    let joint = split(&llama(2), 1, "cp=2 tp=2", &by);
    assert!(count(&phases(&joint).f).contains("all_reduce<tp> 2"));
}

/// Parameters stored in shards over an axis, and read whole.
struct Stored;

impl Strategy for Stored {
    fn name(&self) -> &'static str {
        "stored in shards"
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        let params = ctx.params();
        params.into_iter().try_for_each(|p| ctx.store(p.value, 0, "dp"))
    }
}

#[test]
fn fsdp_by_annotation() {
    let by: [&dyn Strategy; 2] = [&Stored, &BatchParallel::default()];
    check(&llama(4), 1, "dp=2", &by, "all_gather<dp> 9", "all_gather<dp> 9, reduce_scatter<dp> 9");
}

#[test]
fn gradients_end_as_their_parameters_are_stored() {
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &Megatron::default()];
    let ends = |kv_heads: usize, mesh: &str| -> BTreeMap<String, String> {
        let joint = split(&llama(kv_heads), 1, mesh, &by);
        let layout = |p: &Port| joint.program.ty(p.value).layout.to_string();
        let gradients = joint.program.outputs_with(Role::Gradient);
        gradients.map(|p| (p.name.clone(), layout(p))).collect()
    };
    let found = ends(4, "dp=2 tp=2");
    for (name, layout) in [
        ("attn.q", "{1:tp P:dp}"),
        ("attn.out", "{0:tp P:dp}"),
        ("norm1", "{P:dp,tp}"),
        ("norm2", "{P:dp,tp}"),
    ] {
        assert_eq!(found[name], layout, "{name}");
    }
    let found = ends(2, "dp=2 tp=4");
    assert_eq!(found["attn.k"], "{1:tp.0 P:dp,tp.1}");
    assert_eq!(found["attn.q"], "{1:tp.0,tp.1 P:dp}");
}

#[test]
fn the_weight_half_gathers_again_what_was_kept_in_shards() {
    let by: [&dyn Strategy; 3] =
        [&BatchParallel::default(), &Megatron::default(), &Sequence::default()];
    let joint = split(&llama(4), 1, "dp=2 tp=2", &by);
    let programs = phases(&joint);
    assert_eq!(count(&programs.b), "all_gather<tp> 2, reduce_scatter<tp> 2");
    assert_eq!(count(&programs.w), "all_gather<tp> 4");
    let params = programs.w.inputs_with(Role::Param).count();
    assert_eq!(params, 0);
}

#[test]
fn three_dimensional_products_by_annotation() {
    let mesh: Mesh = "i=2 j=2 l=2".parse().unwrap();
    let b = Builder::new("mlp", DType::F64);
    let x = b.boundary("x", [16, 8]);
    let a = x.matmul(b.param("w1", [8, 16])).annotate("0:i,l 1:j");
    b.output("y", a.gelu().matmul(b.param("w2", [16, 8])));
    let forward = b.finish().unwrap();
    let mut ctx = Annotator::new(&forward, &mesh).unwrap();
    ctx.by("test");
    for (name, layout) in [("x", "0:i,j 1:l"), ("w1", "0:l,i 1:j"), ("w2", "0:j,i 1:l")] {
        ctx.layout(forward.input_named(name).unwrap().value, layout).unwrap();
    }
    ctx.layout(forward.output_named("y").unwrap().value, "0:i,j 1:l").unwrap();
    let whole = joint(&forward, DType::F64).unwrap();
    let parts = partition(&whole, &mesh, &ctx.finish(), &Costs::default()).unwrap();
    let f = "all_gather<i> 2, all_gather<j> 1, all_gather<l> 1, reduce_scatter<j> 1, \
             reduce_scatter<l> 1";
    assert_eq!(count(&phases(&parts).f), f);
}

#[test]
fn contradictions_name_both_sides() {
    let mesh: Mesh = "tp=2".parse().unwrap();
    let by: [&dyn Strategy; 2] = [&Megatron::default(), &BatchParallel { axis: "tp".to_owned() }];
    let error = apply(&llama(4), &mesh, &by).unwrap_err().to_string();
    for part in ["Megatron tensor parallelism", "data parallelism", "embed", "over `tp`"] {
        assert!(error.contains(part), "{error}");
    }
    let mesh: Mesh = "tp=8".parse().unwrap();
    let error = apply(&llama(4), &mesh, &by[..1]).unwrap_err().to_string();
    assert!(error.contains("4 heads are fewer than the 8 ranks"), "{error}");
    let mesh: Mesh = "dp=8".parse().unwrap();
    let error = apply(&llama(4), &mesh, &[&BatchParallel::default()]).unwrap_err().to_string();
    assert!(error.contains("a batch of 4 cannot be divided among the 8 ranks"), "{error}");
}

#[test]
fn layers_by_themselves_scatter_what_they_sum() {
    let shape = BatchShape { batch: 4, seq: 1 };
    let model = mlp().model(shape, DType::F64).unwrap();
    let by: [&dyn Strategy; 2] = [&BatchParallel::default(), &Megatron::default()];
    check(&model, 0, "dp=2 tp=2", &by, "", "");
    check(&model, 1, "dp=2 tp=2", &by, "reduce_scatter<tp> 1", "all_gather<tp> 1");
    check(&model, 2, "dp=2 tp=2", &by, "all_reduce<dp> 1, all_reduce<tp> 1", "");
}

#[test]
fn an_axis_that_straddles_heads_names_its_split() {
    let model = llama(2);
    let mesh: Mesh = "tp=4".parse().unwrap();
    let mut ctx = Annotator::new(&model.segments()[1], &mesh).unwrap();
    let key = model.segments()[1].input_named("attn.k").unwrap().value;
    ctx.shard(key, 1, "tp").unwrap();
    let whole = joint(&model.segments()[1], DType::F64).unwrap();
    let error = partition(&whole, &mesh, &ctx.finish(), &Costs::default()).unwrap_err();
    assert!(error.to_string().contains("split it: tp = 2×2"), "{error}");
}

#[test]
fn the_order_of_strategies_does_not_matter() {
    let (data, kv, tp, sp) = (
        BatchParallel::default(),
        AllGatherKv::default(),
        Megatron::default(),
        Sequence::default(),
    );
    let f = "all_gather<cp> 2, all_gather<tp> 2, reduce_scatter<tp> 2";
    let bw = "all_gather<cp> 2, all_gather<tp> 4, reduce_scatter<cp> 2, reduce_scatter<tp> 2";
    let forth: [&dyn Strategy; 4] = [&data, &kv, &tp, &sp];
    let back: [&dyn Strategy; 4] = [&sp, &tp, &kv, &data];
    for by in [forth, back] {
        check(&llama(4), 1, "dp=2 cp=2 tp=2", &by, f, bw);
    }
}
