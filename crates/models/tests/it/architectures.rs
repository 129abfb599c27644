//! What the architectures are made of: counts, names, ties, boundaries.

use phalanx_ir::ops::UnaryKind;
use phalanx_ir::{DType, Init, Model, Role, verify};
use phalanx_models::hf::{GptSpec, LlamaSpec, RopeScaling, RopeSpec, names};
use phalanx_models::{
    Architecture, AuxScope, BatchShape, Capacity, Experts, Gpt, LateExperts, Llama, Mlp, Purpose,
    Router, port,
};

pub(crate) const SHAPE: BatchShape = BatchShape { batch: 2, seq: 8 };

/// Every second layer has experts.
pub(crate) fn small_mixture() -> Llama {
    let experts = Experts {
        capacity: Capacity::Factor(1.0),
        parts: 1,
        group: Some(4),
        every: 2,
        shared: 2,
        residual: true,
        aux_loss: 0.1,
        aux_scope: AuxScope::Group,
        z_loss: 0.1,
        ..Experts::new(3, 6, Router::TopK { k: 2 })
    };
    Llama { experts: Some(experts), ..small_llama() }
}

/// LLaMA style with sizes that are all different.
pub(crate) fn small_llama() -> Llama {
    Llama::new(LlamaSpec {
        layers: 3,
        width: 16,
        heads: 6,
        kv_heads: 3,
        head_dim: 4,
        ffn: 20,
        vocab: 37,
        context: 32,
        norm_eps: 1e-5,
        rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        tied: false,
    })
}

/// GPT-2 style with dropout.
pub(crate) fn small_gpt() -> Gpt {
    let spec = GptSpec {
        layers: 2,
        width: 12,
        heads: 3,
        ffn: 40,
        vocab: 37,
        context: 32,
        norm_eps: 1e-5,
        tied: true,
    };
    Gpt { dropout: 0.1, ..Gpt::new(spec) }
}

pub(crate) fn small_mlp() -> Mlp {
    Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(5, [7, 7, 7], 2) }
}

fn llama(layers: usize, width: usize, heads: usize, ffn: usize, vocab: usize) -> Llama {
    let mut model = small_llama();
    model.spec = LlamaSpec {
        layers,
        width,
        heads,
        kv_heads: heads,
        head_dim: width / heads,
        ffn,
        vocab,
        ..model.spec
    };
    model
}

#[test]
fn parameters_of_the_presets() {
    let bench = llama(6, 384, 6, 1024, 8192);
    let block = 4 * 384 * 384 + 3 * 384 * 1024 + 2 * 384;
    let count = bench.parameters().unwrap();
    assert_eq!(count, 2 * 8192 * 384 + 6 * block + 384);
    assert_eq!(count, 16_913_280);

    let large = llama(16, 2048, 16, 5632, 32_000);
    assert_eq!(large.parameters().unwrap(), 953_223_168);

    let mut tiny = llama(8, 64, 8, 128, 509);
    tiny.spec.kv_heads = 4;
    let block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64;
    assert_eq!(tiny.parameters().unwrap(), 2 * 509 * 64 + 8 * block + 64);

    let gpt2 = Gpt::new(GptSpec {
        layers: 12,
        width: 768,
        heads: 12,
        ffn: 3072,
        vocab: 50_304,
        context: 1024,
        norm_eps: 1e-5,
        tied: true,
    });
    assert_eq!(gpt2.parameters().unwrap(), 124_475_904);
}

/// Models of DeepSpeed-MoE (Rajbhandari et al., 2022) and MegaBlocks (Gale et al., 2022). Their experts are two
/// matrices of h × 4h; three of h × 8h/3 are as many numbers.
#[test]
fn parameters_of_published_mixtures() {
    for (name, layers, width, experts, every, published, within) in [
        ("350M + 128 experts", 24, 1024_usize, 128, 2, 13.0e9, 0.06),
        ("1.3B + 128 experts", 24, 2048, 128, 2, 52.0e9, 0.06),
        ("MegaBlocks XS", 6, 512, 64, 1, 839e6, 0.003),
        ("MegaBlocks Small", 12, 768, 64, 1, 3693e6, 0.003),
        ("MegaBlocks Medium", 24, 1024, 64, 1, 13_041e6, 0.003),
    ] {
        let ffn = (8 * width).div_ceil(3);
        let mut model = llama(layers, width, width / 64, ffn, 51_200);
        model.spec.tied = true;
        model.experts = Some(Experts { every, ..Experts::new(experts, ffn, Router::Switch) });
        let found = model.parameters().unwrap() as f64;
        assert!((found / published - 1.0).abs() < within, "{name}: {found:e}");
    }
}

/// PR-MoE (Rajbhandari et al., 2022): the last two of twelve layers with experts have twice as many, and beside the
/// experts every layer keeps its dense part.
#[test]
fn parameters_of_published_pyramids() {
    for (width, count, published) in [(1024_usize, 32, 4.0e9), (2048, 64, 31.0e9)] {
        let ffn = (8 * width).div_ceil(3);
        let mut model = llama(24, width, width / 64, ffn, 51_200);
        model.spec.tied = true;
        model.experts = Some(Experts {
            every: 2,
            residual: true,
            late: Some(LateExperts { layers: 2, count: 2 * count }),
            ..Experts::new(count, ffn, Router::Switch)
        });
        let found = model.parameters().unwrap() as f64;
        assert!((found / published - 1.0).abs() < 0.06, "{width}: {found:e}");
        let counts = |name: &str| {
            let all = model.model(SHAPE_OF_ONE, DType::F32).unwrap();
            let of = |p: &phalanx_ir::Param| p.name.ends_with(name).then_some(p.shape[0]);
            all.params().iter().filter_map(of).collect::<Vec<_>>()
        };
        assert_eq!(counts("experts.gate"), [vec![count; 10], vec![2 * count; 2]].concat());
        assert_eq!(counts("mlp.gate").len(), 24);
    }
}

const SHAPE_OF_ONE: BatchShape = BatchShape { batch: 1, seq: 1 };

#[test]
fn parameters_of_a_perceptron() {
    let count = small_mlp().parameters().unwrap();
    assert_eq!(count, (5 * 7 + 7) + 2 * (7 * 7 + 7) + (7 * 2 + 2));
}

/// The list that weights are imported by was written apart from the programs.
#[test]
fn parameters_are_those_that_weights_are_imported_by() {
    let tied = |mut m: Llama| {
        m.spec.tied = true;
        m
    };
    let untied = |mut m: Gpt| {
        m.spec.tied = false;
        m
    };
    let all: [&dyn Architecture; 5] = [
        &small_llama(),
        &tied(small_llama()),
        &small_gpt(),
        &untied(small_gpt()),
        &small_mixture(),
    ];
    for architecture in all {
        let mut expected: Vec<(String, Vec<usize>)> = names::params(&architecture.spec().unwrap())
            .into_iter()
            .map(|p| (p.name, p.shape))
            .collect();
        // The matrices of a parameter follow one another.
        expected.dedup();
        assert_eq!(named_shapes(&build(architecture, Purpose::Train)), expected);
    }
}

#[test]
fn every_model_verifies_for_every_purpose_and_precision() {
    let all: [&dyn Architecture; 4] =
        [&small_llama(), &small_gpt(), &small_mlp(), &small_mixture()];
    for architecture in all {
        let trained = named_shapes(&build(architecture, Purpose::Train));
        for compute in [DType::F64, DType::F32, DType::Bf16] {
            for purpose in [Purpose::Train, Purpose::Evaluate, Purpose::Predict] {
                let model = architecture.build(SHAPE, compute, purpose).unwrap();
                assert_eq!(named_shapes(&model), trained);
                for segment in model.segments() {
                    verify(segment).unwrap();
                }
                let ends: Vec<Role> = last(&model).outputs().iter().map(|p| p.role).collect();
                match purpose {
                    Purpose::Predict => assert_eq!(ends, [Role::Probe]),
                    _ => assert_eq!(ends, [Role::Loss]),
                }
            }
        }
    }
}

#[test]
fn blocks_share_one_program_and_pass_one_boundary_value() {
    for architecture in [&small_llama() as &dyn Architecture, &small_gpt()] {
        let model = build(architecture, Purpose::Train);
        let segments: Vec<&str> = model.segments().iter().map(|s| s.name.as_str()).collect();
        assert_eq!(segments, ["embed", "block", "head"]);
        for (i, instance) in model.instances().iter().enumerate() {
            let program = model.program(i);
            let ins: Vec<&str> = boundaries(program.inputs_with(Role::Boundary));
            let outs: Vec<&str> = boundaries(program.outputs_with(Role::Boundary));
            let (first, end) = (i == 0, i + 1 == model.instances().len());
            assert_eq!(ins, vec![port::H; usize::from(!first)], "{}", instance.name);
            assert_eq!(outs, vec![port::H; usize::from(!end)], "{}", instance.name);
        }
        assert_eq!(model.instances()[2].name, "blocks.1");
    }
    // A perceptron's equal layers are one program too.
    assert_eq!(build(&small_mlp(), Purpose::Train).segments().len(), 3);
}

#[test]
fn a_tied_head_reads_the_embedding() {
    let model = build(&small_gpt(), Purpose::Train);
    assert_eq!(model.params()[0].name, "embed");
    assert_eq!(model.users()[0], 2);
    assert!(model.users()[1..].iter().all(|&n| n == 1));
    assert!(model.params().iter().all(|p| p.name != "head"));

    let model = build(&small_llama(), Purpose::Train);
    assert!(model.users().iter().all(|&n| n == 1));
    assert_eq!(model.params().last().unwrap().name, "head");
}

#[test]
fn dropout_is_for_training_alone() {
    let asks_for_key = |purpose| {
        let model = build(&small_gpt(), purpose);
        let keyed = |i: usize| model.program(i).input_named("key").is_some();
        (0..model.instances().len()).map(keyed).collect::<Vec<_>>()
    };
    assert_eq!(asks_for_key(Purpose::Train), [true, true, true, false]);
    assert_eq!(asks_for_key(Purpose::Evaluate), [false; 4]);
    assert_eq!(asks_for_key(Purpose::Predict), [false; 4]);
}

#[test]
fn starts_and_decay() {
    let model = build(&small_gpt(), Purpose::Train);
    let find = |name: &str| model.params().iter().find(|p| p.name == name).unwrap();
    assert_eq!(find("embed").init, Init::Normal(0.02));
    assert_eq!(find("pos").init, Init::Normal(0.02));
    assert_eq!(find("blocks.1.attn.q").init, Init::Normal(0.02));
    // Two layers: 0.02 / √4.
    assert_eq!(find("blocks.1.attn.out").init, Init::Normal(0.01));
    assert_eq!(find("blocks.0.mlp.down").init, Init::Normal(0.01));
    assert_eq!(find("blocks.0.norm2.gain").init, Init::Constant(1.0));
    assert_eq!(find("norm.bias").init, Init::Constant(0.0));
    assert_eq!(find("blocks.0.mlp.down_bias").init, Init::Constant(0.0));
    assert!(find("blocks.0.mlp.up").decay && find("embed").decay);
    assert!(!find("blocks.0.mlp.up_bias").decay && !find("norm.gain").decay);

    let model = build(&small_llama(), Purpose::Train);
    let ones = model.params().iter().filter(|p| p.init == Init::Constant(1.0));
    let ones: Vec<&str> = ones.map(|p| p.name.as_str()).collect();
    assert_eq!(ones.len(), 7);
    assert!(ones.iter().all(|name| name.contains("norm")));
}

pub(crate) fn build(architecture: &dyn Architecture, purpose: Purpose) -> Model {
    architecture.build(SHAPE, DType::F32, purpose).unwrap()
}

fn last(model: &Model) -> &phalanx_ir::Program {
    model.program(model.instances().len() - 1)
}

fn named_shapes(model: &Model) -> Vec<(String, Vec<usize>)> {
    let params = model.params().iter();
    params.map(|p| (p.name.clone(), p.shape.clone())).collect()
}

fn boundaries<'a>(ports: impl Iterator<Item = &'a phalanx_ir::Port>) -> Vec<&'a str> {
    ports.map(|p| p.name.as_str()).collect()
}
