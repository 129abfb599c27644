//! A context that no rank has the memory for, as docs/systems/ring_attention.md shows it: keys that come
//! block by block let it train.

use crate::command::phalanx;

#[test]
fn a_context_that_fits_no_rank_alone_trains_in_a_ring() {
    let dir = tempfile::tempdir().unwrap();
    let model = ["train", "--preset", "tiny", "--set", "model.layers=2", "--json"];
    let context = ["--set", "model.context=2048", "--set", "train.seq_len=2048"];
    let limit = ["--set", "train.batch_size=1", "--set", "train.steps=1"];
    let limit = [&limit[..], &["--set", "run.memory_limit=6800KiB"]].concat();
    let run = |ranks: &[&str]| phalanx(dir.path(), &[&model, &context, &limit, ranks]);
    run(&[]).refused(&["the plan takes", "run.memory_limit allows"]);
    let ranks = |kind| ["--set", "parallel.cp=4", "--set", kind];
    run(&ranks("parallel.cp_kind=allgather")).refused(&["the plan of a rank takes"]);
    let out = run(&ranks("parallel.cp_kind=ring")).ok().out;
    assert!(out.contains("\"loss\":"), "{out}");
}
