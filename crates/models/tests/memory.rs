//! Exporting a model holds one tensor of it at most. A binary of its own, because the counting allocator
//! is global.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_models::hf::{self, GptSpec, LlamaSpec, Params, RopeScaling, RopeSpec, TensorInfo};
use phalanx_models::hf::{ModelFolder, ModelSpec, WeightTensor, Weights, names};
use phalanx_sys::count_alloc::{CountingAllocator, peak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// What is held beside tensors: a writer's buffer of 1 MiB, pieces, names.
const BESIDE: u64 = 3 << 20;

fn specs() -> [ModelSpec; 2] {
    let rope = RopeSpec { theta: 10_000.0, scaling: RopeScaling::None };
    let (layers, width, heads, ffn, vocab, context) = (24, 512, 8, 1536, 4096, 64);
    let (norm_eps, tied) = (1e-5, false);
    let (kv_heads, head_dim) = (8, 64);
    let gpt = GptSpec { layers, width, heads, ffn, vocab, context, norm_eps, tied };
    let llama = LlamaSpec {
        layers,
        width,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        context,
        norm_eps,
        rope,
        tied,
    };
    [ModelSpec::Llama(llama), ModelSpec::Gpt(gpt)]
}

/// Writes a run's file of a model of zeros, and tells the bytes of all tensors and of the largest.
fn write(path: &Path, spec: &ModelSpec) -> (u64, u64) {
    let params = names::params(spec).into_iter();
    let mut layouts: Vec<TensorInfo> =
        params.map(|p| TensorInfo { name: p.name, shape: p.shape, dtype: DType::F32 }).collect();
    layouts.sort_by(|a, b| a.name.cmp(&b.name));
    hf::stream_params(path, &layouts, &BTreeMap::new(), |at| {
        Some(WeightTensor::f32(layouts[at].shape.clone(), vec![0.0; layouts[at].elements()]))
    })
    .unwrap();
    let bytes = || layouts.iter().map(|layout| 4 * layout.elements() as u64);
    (bytes().sum(), bytes().max().unwrap())
}

/// One test only: the harness itself allocates while it starts a second one.
#[test]
fn not_more_than_one_tensor_is_held() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory");
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("run.safetensors");
    for spec in specs() {
        let ((all, largest), most) = peak(|| write(&path, &spec));
        assert!(all > 8 * (largest + BESIDE), "{all} and {largest}: the test tells nothing");
        assert!(most < largest + BESIDE, "{most} bytes held to stream {largest}");

        let params = Params::open(&path).unwrap();
        let (_, most) =
            peak(|| hf::save(&dir, &spec, &params, DType::Bf16, &hf::KeptKeys::default()).unwrap());
        assert!(most < largest + BESIDE, "{most} bytes held to export {largest}");
        assert!(most > 1 << 20, "the counter works");

        // Of a transposed tensor too, little more is held than what is asked for.
        let source = ModelFolder::open(&dir).unwrap();
        let rows = 7..4096 * 100;
        let bytes = 4 * rows.len() as u64;
        let (_, most) = peak(|| source.read_ranges("head", &[rows], DType::F32).unwrap());
        assert!(most < bytes + (2 << 20), "{most} bytes held to read {bytes}");
    }
}
