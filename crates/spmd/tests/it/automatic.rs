//! The open choice: nothing annotated but a mesh and a memory limit.

use std::collections::BTreeMap;

use phalanx_ir::{DType, Mesh, Model, Param, Program, Role, text};
use phalanx_models::hf::{GptSpec, LlamaSpec, RopeScaling, RopeSpec};
use phalanx_models::{Architecture, BatchShape, Gpt, Llama};
use phalanx_spmd::strategies::Automatic;
use phalanx_spmd::{Costs, apply, partition};

use crate::support::{count, phases};

const WIDTH: usize = 1024;

fn llama(shape: BatchShape) -> Model {
    let rope = RopeSpec { theta: 10000.0, scaling: RopeScaling::None };
    Llama::new(LlamaSpec {
        layers: 4,
        width: WIDTH,
        heads: 16,
        kv_heads: 16,
        head_dim: 64,
        ffn: 4096,
        vocab: 8192,
        context: 4096,
        norm_eps: 1e-5,
        rope,
        tied: false,
    })
    .model(shape, DType::F32)
    .unwrap()
}

fn gpt(shape: BatchShape) -> Model {
    Gpt::new(GptSpec {
        layers: 4,
        width: WIDTH,
        heads: 16,
        ffn: 4096,
        vocab: 8192,
        context: 4096,
        norm_eps: 1e-5,
        tied: true,
    })
    .model(shape, DType::F32)
    .unwrap()
}

/// The collectives of the block, and the layout of each of its parameters.
fn found(model: &Model, limit: Option<usize>) -> (String, String, Vec<(String, String)>) {
    let mesh: Mesh = "tp=4".parse().unwrap();
    let costs = Costs { memory_limit: limit, ..Costs::default() };
    let automatic = Automatic::search(model, &mesh, &costs).unwrap();
    assert!(limit.is_none_or(|l| automatic.memory <= l as f64));
    let (mesh, annotations) = apply(model, &mesh, &[&automatic]).unwrap();
    let joint = phalanx_autodiff::joint(&model.segments()[1], DType::F32).unwrap();
    let parts = partition(&joint, &mesh, &annotations[1], &Costs::default()).unwrap();
    let program = &parts.program;
    let layouts = (program.inputs_with(Role::Param))
        .map(|p| (p.name.clone(), program.ty(p.value).layout.to_string()))
        .collect();
    let cut = phases(&parts);
    (count(&cut.f), count(&cut.bw), layouts)
}

fn layout<'a>(layouts: &'a [(String, String)], name: &str) -> &'a str {
    &layouts.iter().find(|(n, _)| n == name).unwrap().1
}

#[test]
fn small_batches_and_little_memory_give_megatrons_block() {
    let shape = BatchShape { batch: 1, seq: 1024 };
    for (model, gated) in [(llama(shape), true), (gpt(shape), false)] {
        // Below the replicated weights; what is kept of the activations counts too.
        let limit = model.elements() * 4 * 85 / 100;
        let (f, bw, layouts) = found(&model, Some(limit));
        let sums = ("all_reduce<tp> 2", "all_reduce<tp> 2");
        let pairs = "all_gather<tp> 2, reduce_scatter<tp> 2";
        let same = (f.as_str(), bw.as_str()) == sums || f == pairs;
        assert!(same, "{f} | {bw} | {layouts:?}");
        for column in ["attn.q", "attn.k", "attn.v", "mlp.up"] {
            assert_eq!(layout(&layouts, column), "{1:tp}", "{column}");
        }
        for row in ["attn.out", "mlp.down"] {
            assert_eq!(layout(&layouts, row), "{0:tp}", "{row}");
        }
        if gated {
            assert_eq!(layout(&layouts, "mlp.gate"), "{1:tp}");
        }
    }
}

/// A program whose parameters have names that say nothing.
fn renamed_program(program: &Program) -> Program {
    let names: Vec<&str> = program.inputs_with(Role::Param).map(|p| p.name.as_str()).collect();
    let mut out = String::new();
    let mut word = String::new();
    for c in program.to_string().chars().chain([' ']) {
        if c.is_ascii_alphanumeric() || "._".contains(c) {
            word.push(c);
            continue;
        }
        match names.iter().position(|name| *name == word) {
            Some(index) => out += &format!("z{index}"),
            None => out += &word,
        }
        word.clear();
        out.push(c);
    }
    text::parse(&out).unwrap_or_else(|error| panic!("{error}\n{out}"))
}

/// The same model under other names.
fn renamed(model: &Model) -> Model {
    let mut other = Model::new("renamed");
    for (index, param) in model.params().iter().enumerate() {
        other.param(Param { name: format!("p{index}"), ..param.clone() }).unwrap();
    }
    for program in model.segments() {
        other.segment(renamed_program(program));
    }
    for instance in model.instances() {
        let program = &model.segments()[instance.segment];
        let locals = program.inputs_with(Role::Param).enumerate();
        let params: BTreeMap<String, usize> =
            locals.map(|(i, port)| (format!("z{i}"), instance.params[&port.name])).collect();
        other.append(&instance.name, instance.segment, params).unwrap();
    }
    other
}

/// What a weight is called says nothing: layouts follow from what the program does with it.
#[test]
fn renamed_weights_are_laid_out_alike() {
    let shape = BatchShape { batch: 1, seq: 1024 };
    for model in [llama(shape), gpt(shape)] {
        let limit = model.elements() * 4 * 85 / 100;
        let (f, bw, layouts) = found(&model, Some(limit));
        let (other_f, other_bw, others) = found(&renamed(&model), Some(limit));
        assert_eq!((f, bw), (other_f, other_bw));
        let own: Vec<&String> = layouts.iter().map(|(_, layout)| layout).collect();
        let other: Vec<&String> = others.iter().map(|(_, layout)| layout).collect();
        assert_eq!(own, other);
        assert!(others.iter().all(|(name, _)| name.starts_with('z')), "{others:?}");
    }
}

#[test]
fn a_limit_that_nothing_meets_is_refused_with_both_numbers() {
    let model = llama(BatchShape { batch: 1, seq: 64 });
    let mesh: Mesh = "tp=2".parse().unwrap();
    let costs = Costs { memory_limit: Some(1 << 20), ..Costs::default() };
    let error = Automatic::search(&model, &mesh, &costs).unwrap_err().to_string();
    assert!(error.contains("the limit is 1048576") && error.contains("more ranks"), "{error}");
}

#[test]
fn large_batches_and_enough_memory_give_data_parallelism() {
    for model in
        [llama(BatchShape { batch: 64, seq: 1024 }), gpt(BatchShape { batch: 64, seq: 1024 })]
    {
        let (f, bw, layouts) = found(&model, None);
        assert_eq!((f.as_str(), bw.as_str()), ("", ""), "{layouts:?}");
        for (name, layout) in &layouts {
            assert_eq!(layout, "{}", "{name}");
        }
    }
}
