//! Sizes that can't work are refused by name, with what would work.

use phalanx_ir::DType;
use phalanx_models::{Architecture, BatchShape};

use crate::architectures::{SHAPE, small_gpt, small_llama, small_mlp};

fn refused(architecture: &dyn Architecture, shape: BatchShape) -> String {
    architecture.model(shape, DType::F32).unwrap_err().to_string()
}

#[test]
fn llama_sizes() {
    let with = |change: fn(&mut phalanx_models::Llama)| {
        let mut model = small_llama();
        change(&mut model);
        refused(&model, SHAPE)
    };
    assert_eq!(
        with(|m| m.spec.kv_heads = 4),
        "model llama: kv_heads = 4 does not divide heads = 6; \
         nearest that work: kv_heads = 3 or kv_heads = 6"
    );
    assert_eq!(
        with(|m| m.spec.head_dim = 5),
        "model llama: head_dim = 5 is odd, but rotary positions rotate pairs of elements; \
         nearest that work: 4 or 6"
    );
    assert_eq!(
        with(|m| m.spec.head_dim = 1),
        "model llama: head_dim = 1 is odd, but rotary positions rotate pairs of elements; \
         nearest that works: 2"
    );
    assert_eq!(with(|m| m.spec.kv_heads = 0), "model llama: kv_heads = 0: it must be at least 1");
    assert_eq!(
        with(|m| m.spec.norm_eps = f64::NAN),
        "model llama: norm_eps = NaN: it must be a finite number above 0"
    );
    assert_eq!(
        with(|m| m.spec.vocab = usize::MAX / 2),
        "model llama: width = 16 × vocab = 9223372036854775807 multiply to more than \
         2^48 elements: choose smaller ones"
    );
}

#[test]
fn gpt_sizes() {
    let mut model = small_gpt();
    model.spec.heads = 5;
    assert_eq!(
        refused(&model, SHAPE),
        "model gpt2: heads = 5 does not divide width = 12; nearest that work: heads = 4 or heads = 6"
    );
    let mut model = small_gpt();
    model.dropout = 1.0;
    assert_eq!(
        refused(&model, SHAPE),
        "model gpt2: dropout = 1: it must be at least 0 and below 1"
    );
}

#[test]
fn batches() {
    let long = BatchShape { batch: 1, seq: 33 };
    for architecture in [&small_llama() as &dyn Architecture, &small_gpt()] {
        let text = refused(architecture, long);
        let expected = "sequences of 33 tokens are longer than context = 32; \
                        shorten them, or build the model with context = 33";
        assert!(text.ends_with(expected), "{text}");
    }
    let none = BatchShape { batch: 0, seq: 8 };
    let all: [&dyn Architecture; 3] = [&small_llama(), &small_gpt(), &small_mlp()];
    for architecture in all {
        let text = refused(architecture, none);
        assert!(text.ends_with("batch = 0: it must be at least 1"), "{text}");
    }
}

#[test]
fn perceptron_widths() {
    let mut model = small_mlp();
    model.hidden[1] = 0;
    assert_eq!(refused(&model, SHAPE), "model mlp: hidden[1] = 0: it must be at least 1");
}
