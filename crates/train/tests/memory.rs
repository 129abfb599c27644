//! Starting, saving, exporting and evaluating pass weights through host memory one tensor at a time. A
//! binary of its own, because the counting allocator is global.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::path::Path;

use phalanx_config::{Config, Loaded, Sources};
use phalanx_ir::DType;
use phalanx_session::network::Network;
use phalanx_session::{Prepared, Settings};
use phalanx_sys::count_alloc::{CountingAllocator, peak};
use phalanx_train::eval::{self, ModelSource};
use phalanx_train::rundir::RunDir;
use phalanx_train::saved::{self, Saved};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Programs, scripts, plans and small buffers.
const BESIDE: u64 = 8 << 20;

fn config(root: &Path) -> Loaded {
    let root = format!("run.dir={}", root.display());
    let sets = [
        "model.layers=24",
        "model.width=256",
        "model.heads=4",
        "model.kv_heads=4",
        "model.ffn=768",
        "train.batch_size=2",
        "train.microbatches=1",
        "train.seq_len=8",
        "train.eval_batches=1",
        "precision.compute=f32",
        "optim.kind=sgd",
        "run.threads=1",
        "run.name=r",
    ];
    let sources = Sources::default().preset("tiny").set(root);
    Config::load(&sets.iter().fold(sources, |s, set| s.set(*set))).unwrap()
}

/// One test only: the harness itself allocates while it starts a second one.
#[test]
fn weights_pass_one_tensor_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let loaded = config(root.path());
    let run = RunDir::create(&loaded).unwrap();
    let network = Network::new(&loaded).unwrap();
    let models = network.models(&loaded.config, false).unwrap();
    let sizes = || models.train.params().iter().map(|p| 4 * p.elements() as u64);
    let (all, largest) = (sizes().sum::<u64>(), sizes().max().unwrap());
    let most = 4 * largest + BESIDE;
    assert!(all > 5 * most, "{all} bytes, {largest} in the largest: the test tells nothing");
    let small = |what: &str, held: u64| {
        assert!(held < most, "{what} held {held} bytes, the largest tensor has {largest}");
    };

    let prepared = Prepared::new(&models, Settings::new(&loaded.config).unwrap()).unwrap();
    let (session, held) = peak(|| prepared.start(&*network.start()).unwrap());
    small("starting", held);
    let mut session = session;
    let spec = network.architecture.spec().unwrap();
    let (_, held) = peak(|| saved::save(&run.weights(), Some(&spec), &mut session).unwrap());
    small("saving", held);
    drop(session);

    let none = Sources::default();
    let out = root.path().join("hf");
    let (_, held) = peak(|| {
        Saved::open(run.path(), &none).unwrap().export(&out, DType::F32).unwrap();
    });
    small("exporting", held);
    for source in [ModelSource::Run(run.path().into()), ModelSource::HuggingFace(out.clone())] {
        let (answer, held) = peak(|| eval::answer(&source, &none, &[1, 2, 3]).unwrap());
        assert!(answer.loss.is_finite());
        small("answering", held);
    }
    let source = ModelSource::Run(run.path().into());
    let (_, held) = peak(|| eval::held_out(&source, &none).unwrap());
    small("evaluating", held);
}
