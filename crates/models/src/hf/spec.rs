//! The numbers that define a model, free of any file format.

use crate::experts::LateExperts;
use phalanx_ir::ops::{RopeScaling, Rotary};

/// A model that can be exchanged with Hugging Face.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSpec {
    /// LayerNorm, learned positions, GELU, biases.
    Gpt(GptSpec),
    /// RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.
    Llama(LlamaSpec),
    /// The same with experts in place of the feed-forward part.
    Mixtral(MixtralSpec),
    /// RMSNorm, scores with a bias by distance, an encoder and a decoder.
    T5(T5Spec),
}

/// The sizes of a GPT-2 model. Its activation is GELU in the tanh form.
#[derive(Clone, Debug, PartialEq)]
pub struct GptSpec {
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Attention heads; the head size is `width / heads`.
    pub heads: usize,
    /// Inner width of the feed-forward part.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Longest sequence: the number of learned positions.
    pub context: usize,
    /// Added to the variance in LayerNorm.
    pub norm_eps: f64,
    /// Whether the head reads the embedding.
    pub tied: bool,
}

/// The sizes of a LLaMA model.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaSpec {
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Size of one head, usually but not necessarily `width / heads`.
    pub head_dim: usize,
    /// Inner width of the feed-forward part.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Longest sequence.
    pub context: usize,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f64,
    /// Rotary positions.
    pub rope: RopeSpec,
    /// Whether the head reads the embedding.
    pub tied: bool,
}

/// The sizes of a LLaMA model with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MixtralSpec {
    /// What it has in common with LLaMA; `ffn` is the inner width of layers without experts.
    pub base: LlamaSpec,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that each token takes.
    pub top_k: usize,
    /// Inner width of an expert.
    pub expert_ffn: usize,
    /// Layer `i`, counted from 1, has experts if this divides `i`. Hugging Face knows 1 alone.
    pub every: usize,
    /// Experts besides that every token takes; none at Hugging Face.
    pub shared: usize,
    /// Whether the dense part of a layer stays, and experts add to it; not so at Hugging Face.
    pub residual: bool,
    /// Whether the gates of a token add up to one, as at Hugging Face.
    pub normalised: bool,
    /// Whether routers have weights of the noise of their logits; not so at Hugging Face.
    pub noisy: bool,
    /// The last layers with experts, if they have another number of them; not so at Hugging Face.
    pub late: Option<LateExperts>,
}

/// The sizes of a T5 model.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Spec {
    /// Blocks of the encoder, and as many of the decoder.
    pub layers: usize,
    /// Elements per token between blocks.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Size of one head, usually but not necessarily `width / heads`.
    pub head_dim: usize,
    /// Width inside the feed-forward part of a block.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Kinds of distances between a query and a key.
    pub buckets: usize,
    /// From this distance on, all are alike.
    pub far: usize,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f64,
    /// Whether the head reads the table of words.
    pub tied: bool,
    /// Whether what the head reads is scaled by 1/√width.
    pub scaled: bool,
    /// Whether a GELU of one product gates the other, as in version 1.1; otherwise it is the ReLU of one.
    pub gated: bool,
}

impl T5Spec {
    /// A model of these sizes, as published in 2020: heads of ⌊width / heads⌋ elements, 32 kinds of distances up to
    /// 128, tied and scaled.
    pub fn new(layers: usize, width: usize, heads: usize, ffn: usize, vocab: usize) -> Self {
        let (head_dim, buckets, far) = (width.checked_div(heads).unwrap_or(0), 32, 128);
        Self {
            layers,
            width,
            heads,
            head_dim,
            ffn,
            vocab,
            buckets,
            far,
            norm_eps: 1e-6,
            tied: true,
            scaled: true,
            gated: false,
        }
    }
}

/// Rotary positions: how fast each pair of a head's elements rotates with the position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// The base of the geometric series of frequencies.
    pub theta: f64,
    /// How the frequencies are changed for contexts longer than the trained one.
    pub scaling: RopeScaling,
}

impl RopeSpec {
    /// The op that rotates queries and keys in this way.
    pub fn rotary(&self) -> Rotary {
        Rotary { theta: self.theta, scaling: self.scaling, inverse: false }
    }
}

impl ModelSpec {
    /// Size of the vocabulary.
    pub fn vocab(&self) -> usize {
        match self {
            ModelSpec::Gpt(spec) => spec.vocab,
            ModelSpec::Llama(spec) => spec.vocab,
            ModelSpec::Mixtral(spec) => spec.base.vocab,
            ModelSpec::T5(spec) => spec.vocab,
        }
    }

    /// Longest sequence; none if any length works.
    pub fn context(&self) -> Option<usize> {
        match self {
            ModelSpec::Gpt(spec) => Some(spec.context),
            ModelSpec::Llama(spec) => Some(spec.context),
            ModelSpec::Mixtral(spec) => Some(spec.base.context),
            ModelSpec::T5(_) => None,
        }
    }

    /// Whether the head reads the embedding instead of its own weights.
    pub fn tied(&self) -> bool {
        match self {
            ModelSpec::Gpt(spec) => spec.tied,
            ModelSpec::Llama(spec) => spec.tied,
            ModelSpec::Mixtral(spec) => spec.base.tied,
            ModelSpec::T5(spec) => spec.tied,
        }
    }
}
