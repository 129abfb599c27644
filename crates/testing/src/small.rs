//! Models small enough for the interpreter.

use phalanx_ir::ops::{AttentionKind, UnaryKind};
use phalanx_models::hf::{GptSpec, LlamaSpec, RopeScaling, RopeSpec};
use phalanx_models::{Gpt, Llama, Mlp};

/// The vocabulary of the small language models.
pub const VOCAB: usize = 11;

/// One layer with grouped heads that are wider than width / heads, so that few sizes agree by chance.
pub fn llama(attention: AttentionKind, tied: bool) -> Llama {
    let rope = RopeSpec { theta: 100.0, scaling: RopeScaling::None };
    let spec = LlamaSpec {
        layers: 1,
        width: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn: 12,
        vocab: VOCAB,
        context: 16,
        norm_eps: 1e-5,
        rope,
        tied,
    };
    Llama { attention, ..Llama::new(spec) }
}

/// An inner width of four times the width, as closed forms have it, and a tied head.
pub fn gpt(attention: AttentionKind, dropout: f64) -> Gpt {
    let spec = GptSpec {
        layers: 1,
        width: 8,
        heads: 2,
        ffn: 32,
        vocab: VOCAB,
        context: 6,
        norm_eps: 1e-5,
        tied: true,
    };
    Gpt { attention, dropout, ..Gpt::new(spec) }
}

/// Two hidden layers.
pub fn mlp() -> Mlp {
    Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(3, [4, 4], 2) }
}

/// The preset `tiny`, its width and what follows from it divided by `narrower`: 8 layers, 8 heads
/// and 4 key heads all the same.
pub fn tiny(narrower: usize) -> Llama {
    let rope = RopeSpec { theta: 10000.0, scaling: RopeScaling::None };
    Llama::new(LlamaSpec {
        layers: 8,
        width: 64 / narrower,
        heads: 8,
        kv_heads: 4,
        head_dim: 8 / narrower,
        ffn: 128 / narrower,
        vocab: 509,
        context: 64,
        norm_eps: 1e-5,
        rope,
        tied: false,
    })
}
