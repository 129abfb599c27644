//! The numbers that define a model, free of any file format.

use std::f64::consts::TAU;

/// A model that can be exchanged with Hugging Face.
#[derive(Clone, Debug, PartialEq)]
pub enum Spec {
    /// LayerNorm, learned positions, GELU, biases.
    Gpt(GptSpec),
    /// RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.
    Llama(LlamaSpec),
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

/// Rotary positions: how fast each pair of a head's entries turns with the position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// The base of the geometric series of frequencies.
    pub theta: f64,
    /// How the frequencies are changed for contexts longer than the trained one.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched to longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Slow frequencies are divided by `factor`, fast ones are kept, with a ramp in between. Slow and
    /// fast are judged by the turns a frequency makes in the original context.
    Llama3 {
        /// The divisor of slow frequencies.
        factor: f64,
        /// At most this many turns: slow.
        low_freq_factor: f64,
        /// At least this many turns: fast.
        high_freq_factor: f64,
        /// The context the model was first trained with.
        original_context: usize,
    },
}

impl RopeSpec {
    /// The angle by which pair `i` of a head (entries `i` and `i + head_dim / 2`) turns per position.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f64> {
        (0..head_dim / 2)
            .map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64))
            .map(|f| self.scaling.apply(f))
            .collect()
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f64) -> f64 {
        match *self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let turns = original_context as f64 * frequency / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }
}

impl Spec {
    /// Whether the head reads the embedding instead of having weights of its own.
    pub fn tied(&self) -> bool {
        match self {
            Spec::Gpt(spec) => spec.tied,
            Spec::Llama(spec) => spec.tied,
        }
    }
}
