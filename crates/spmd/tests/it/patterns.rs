//! The published communication patterns, as counts of collectives per phase.

use phalanx_spmd::Strategy;
use phalanx_spmd::strategies::{AllGatherKv, Data, Megatron, Sequence, Ulysses};

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
    let by: [&dyn Strategy; 2] = [&Data::default(), &Megatron::default()];
    check(&llama(4), 1, "dp=2 tp=2", &by, "all_reduce<tp> 2", "all_reduce<tp> 2");
    check(&gpt(0.1), 1, "dp=2 tp=2", &by, "all_reduce<tp> 2", "all_reduce<tp> 2");
}

#[test]
fn tensor_parallel_ends() {
    let by: [&dyn Strategy; 2] = [&Data::default(), &Megatron::default()];
    check(&llama(4), 0, "dp=2 tp=2", &by, "all_reduce<tp> 1", "");
    check(&llama(4), 2, "dp=2 tp=2", &by, "all_reduce<dp> 1", "all_reduce<tp> 1");
    check(&gpt(0.1), 0, "dp=2 tp=2", &by, "all_reduce<tp> 1", "");
    check(&gpt(0.1), 2, "dp=2 tp=2", &by, "all_reduce<dp> 1", "all_reduce<tp> 1");
}

#[test]
fn sequence_parallel_block() {
    let by: [&dyn Strategy; 3] = [&Data::default(), &Megatron::default(), &Sequence::default()];
    let f = "all_gather<tp> 2, reduce_scatter<tp> 2";
    let bw = "all_gather<tp> 4, reduce_scatter<tp> 2";
    check(&llama(4), 1, "dp=2 tp=2", &by, f, bw);
    check(&gpt(0.1), 1, "dp=2 tp=2", &by, f, bw);
}

#[test]
fn ulysses_block() {
    let by: [&dyn Strategy; 2] = [&Data::default(), &Ulysses::default()];
    check(&llama(4), 1, "dp=2 cp=2", &by, "all_to_all<cp> 4", "all_to_all<cp> 4");
}

#[test]
fn ulysses_with_tensor_parallelism() {
    let by: [&dyn Strategy; 3] = [&Data::default(), &Megatron::default(), &Ulysses::default()];
    let each = "all_reduce<tp> 2, all_to_all<cp> 4";
    check(&llama(4), 1, "dp=2 cp=2 tp=2", &by, each, each);
}

#[test]
fn context_parallel_block() {
    let by: [&dyn Strategy; 2] = [&Data::default(), &AllGatherKv::default()];
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
    let by: [&dyn Strategy; 2] = [&Data::default(), &Megatron::default()];
    check(&llama(2), 1, "dp=2 tp=4", &by, "all_reduce<tp.0,tp.1> 2", "all_reduce<tp.0,tp.1> 2");
}
