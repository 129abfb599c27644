//! Ranks start from a Hugging Face folder: each reads what it holds, and together they hold the folder's
//! bits.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_config::{Loaded, Sources};
use phalanx_ir::DType;
use phalanx_models::hf::{
    self, LlamaSpec, ModelFolder, ModelSpec, RopeScaling, RopeSpec, WeightTensor, Weights,
};
use phalanx_session::from_weights;
use phalanx_session::network::{self, Network};
use phalanx_session::{Parallel, Session};
use phalanx_spmd::strategies::{Fsdp, Megatron};

use crate::support::{models, on, settings, shared};

/// A configuration that starts from a folder.
fn from(dir: &Path, sets: &[&str]) -> Loaded {
    let from = format!("model.from=hf:{}", dir.display());
    let small = ["train.batch_size=4", "train.seq_len=8", "run.threads=1"];
    let sources = Sources::default().preset("tiny").set(from);
    let sources = small.iter().chain(sets).fold(sources, |s, set| s.set(*set));
    network::load(&sources).unwrap_or_else(|error| panic!("{error}"))
}

/// Tensors divided by columns and rows, and what is left of them by elements.
fn divided() -> Parallel {
    on("dp=2 tp=2", [shared(Megatron::default()), shared(Fsdp::default())])
}

#[test]
fn ranks_that_divide_every_tensor_start_from_the_bits_of_the_folder() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    for name in ["gpt2", "llama_gqa", "llama_tied"] {
        let dir = fixtures.join(name);
        let source = ModelFolder::open(&dir).unwrap();
        for sets in [&[][..], &["precision.compute=bf16", "precision.weights=bf16"]] {
            let loaded = from(&dir, sets);
            let network = Network::new(&loaded).unwrap();
            let settings = settings(&loaded, Some(divided()));
            let mut session = Session::new(&models(&loaded), settings, &*network.start()).unwrap();
            // Masters, where weights are narrow, are as wide as the folder's values.
            for (name, found) in session.params().unwrap() {
                let expected = source.read(&name).unwrap();
                assert!(found == expected, "{} of {name} {sets:?}", dir.display());
            }
        }
    }
}

/// A model in which a rank's part of a tensor has many rows.
fn folder(dir: &Path) {
    let spec = ModelSpec::Llama(LlamaSpec {
        layers: 2,
        width: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        ffn: 256,
        vocab: 512,
        context: 8,
        norm_eps: 1e-5,
        rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        tied: false,
    });
    let tensor = |p: hf::names::HfParam| {
        let values = (0..p.shape.iter().product()).map(|i: usize| i as f32).collect();
        (p.name, WeightTensor::f32(p.shape, values))
    };
    let tensors: BTreeMap<String, WeightTensor> =
        hf::names::params(&spec).into_iter().map(tensor).collect();
    hf::save(dir, &spec, &tensors, DType::F32, &hf::KeptKeys::default()).unwrap();
}

/// Four ranks that share everything but norms read the file once, not four times.
#[test]
fn ranks_read_their_own_part_of_the_files() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path());
    let loaded = from(dir.path(), &[]);
    let source = ModelFolder::open(dir.path()).unwrap();
    let stored: usize = source.layouts().iter().map(|layout| 4 * layout.elements()).sum();
    let read = |parallel: Option<Parallel>| {
        let before = source.bytes_read();
        let settings = settings(&loaded, parallel);
        let mut session = Session::new(&models(&loaded), settings, &from_weights(&source)).unwrap();
        let read = (source.bytes_read() - before) as f64 / stored as f64;
        let held = session.params().unwrap();
        assert!(held.iter().all(|(name, tensor)| *tensor == source.read(name).unwrap()));
        read
    };
    let alone = Parallel::default();
    assert_eq!(read(Some(alone)), 1.0);
    let divided = read(Some(divided()));
    assert!((1.0..1.1).contains(&divided), "{divided} times the file");
}
