//! After two steps, running a step's script allocates nothing outside matrix products, on any
//! thread. A binary of its own, because the counting allocator is global.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use phalanx_config::{Config, Sources};
use phalanx_cpu::CpuEngine;
use phalanx_session::corpus::with_step_data;
use phalanx_session::network::Network;
use phalanx_session::{RankWorker, Settings};
use phalanx_sys::count_alloc::{CountingAllocator, Counts, counts};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// What one step allocates once two have run.
fn warm_step(preset: &str, sets: &[&str], threads: usize) -> Counts {
    let small = ["train.batch_size=4", "model.layers=2", "train.microbatches=2"];
    let sources = Sources::default().preset(preset);
    let sources = small.iter().chain(sets).fold(sources, |s, set| s.set(*set));
    let loaded = Config::load(&sources).unwrap();
    let network = Network::new(&loaded).unwrap();
    let models = network.models(&loaded.config, false).unwrap();
    let engine = CpuEngine::new(threads).unwrap();
    let settings = Settings::new(&loaded.config).unwrap();
    let mut session = RankWorker::alone(engine, &models, settings, &*network.start()).unwrap();
    let batch = phalanx_bench::random_batch(&loaded.config, 1);
    let mut before = counts();
    for step in 0..3 {
        if step == 2 {
            before = counts();
        }
        with_step_data(&batch, |data| session.step(data, 1e-3)).unwrap();
    }
    counts() - before
}

#[test]
fn a_warm_step_allocates_only_in_matrix_products() {
    let gpt = [
        "model.width=32",
        "model.heads=4",
        "model.ffn=64",
        "model.vocab=64",
        "model.context=16",
        "train.seq_len=16",
        "model.dropout=0.1",
    ];
    let materialised =
        [&gpt[..], &["model.attention=materialised", "train.recompute=full"]].concat();
    // Those of f32 go through the library, which allocates; own products of narrow types do not.
    let mut exempt = 0;
    for threads in [1, 2] {
        for (preset, sets) in [
            ("tiny", vec![]),
            ("tiny", vec!["precision.compute=bf16", "precision.weights=bf16"]),
            ("tiny", vec!["optim.kind=sgd", "train.recompute=selective"]),
            ("gpt2-124m", gpt.to_vec()),
            ("gpt2-124m", materialised.clone()),
        ] {
            let allocated = warm_step(preset, &sets, threads);
            assert_eq!(allocated.allocations, 0, "{preset} {sets:?} on {threads} threads");
            exempt += allocated.exempt_allocations;
        }
    }
    assert!(exempt > 0, "the counter works");
}
