//! `[model]`: what is trained.

use std::path::PathBuf;

use phalanx_ir::ops::AttentionKind;
use toml_edit::Value;

use super::context::CpKind;
use super::experts::{AuxScopeKind, CapacityKind, RouterKind};
use super::key::section;
use super::setting::{Count, Fraction, NonNegative, Positive, Setting, choice, quoted, words};
use super::values::Values;
use phalanx_error::Problem;

section! {
    /// `[model]`: the network's kind, shape and numerical details.
    pub struct ModelConfig in "model" (seq_len: Count, cp_kind: CpKind) {
        /// Family of networks.
        kind: ModelKind = "llama"; aka "arch" "architecture" "name" "flavor" "model_type",
        /// Number of blocks (llama, gpt2), or of the encoder and of the decoder (t5).
        layers: Count = "4"; aka "num_layers" "n_layers" "n_layer" "num_hidden_layers" "depth",
        /// Elements per token between blocks; called d or hidden size elsewhere.
        width: Count = "128"; aka "hidden_size" "dim" "d_model" "n_embd" "d",
        /// Attention heads; divides width.
        heads: Count = "4"; aka "num_attention_heads" "n_heads" "n_head" "num_heads",
        /// Key and value heads; divides heads. Fewer than heads: grouped-query attention.
        kv_heads: Count = "as many as model.heads" => heads;
            aka "num_key_value_heads" "n_kv_heads" "num_query_groups",
        /// Width inside the feed-forward part of a block.
        ffn: Count = "llama: 8/3 of model.width, rounded up to a multiple of 8; else 4 times it"
            => default_ffn(kind, width);
            aka "ffn_hidden_size" "intermediate_size" "hidden_dim" "n_inner" "ffn_dim",
        /// Number of token ids.
        vocab: Count = "256"; aka "vocab_size" "padded_vocab_size" "vocabulary",
        /// Longest sequence the model takes: rows of gpt2's position table.
        context: Count = "train.seq_len" => seq_len;
            aka "max_position_embeddings" "n_positions" "n_ctx" "max_seq_len" "block_size",
        /// Whether the output head shares the embedding's weights.
        tied: bool = "true for gpt2 and t5, else false" => kind.is_usually_tied();
            aka "tie_word_embeddings" "tie_weights" "weight_tying",
        /// Whether linear layers add a bias.
        bias: bool = "false for llama and t5, else true" => kind.has_biases();
            aka "add_bias_linear" "attention_bias" "mlp_bias",
        /// Added to the variance in norms, to avoid division by zero.
        norm_eps: Positive = "1e-5"; aka "rms_norm_eps" "layer_norm_epsilon" "norm_epsilon",
        /// Base of the rotary position angles.
        rope_theta: Positive = "10000.0"; aka "rotary_base" "rope_base",
        /// Share of elements that dropout sets to zero during training.
        dropout: Fraction = "0.0"; aka "hidden_dropout" "attention_dropout" "resid_pdrop",
        /// Attention that never stores the score matrix (flash), or one that does.
        attention: AttentionKind = "materialised for t5 and parallel.cp_kind = \"rsa\", else flash"
            => usual_attention(kind, cp_kind);
            aka "attn_type" "attention_backend" "attn_implementation",
        /// Standard deviation of the initial weights.
        init_std: Positive = "0.02"; aka "init_method_std" "initializer_range",
        /// Experts of a block's feed-forward part, of which each token takes a few; 0: it is dense.
        experts: usize = "0"; aka "num_experts" "num_local_experts" "n_experts" "moe_num_experts",
        /// How a token chooses its experts.
        router: RouterKind = "top-k"; aka "moe_router" "moe_router_type" "gate_type",
        /// Experts that each token takes.
        top_k: Count = "1 for model.router = \"switch\", else 2" => default_top_k(router);
            aka "num_experts_per_tok" "moe_router_topk" "experts_per_token",
        /// Places of each expert in a group of tokens, as a multiple of its even share; tokens beyond
        /// are dropped. 0: nobody is, and rows are packed; "auto": as many places as a step needs.
        capacity: CapacityKind = "1.25"; aka "capacity_factor" "moe_expert_capacity_factor",
        /// Places in evaluation, in the same way.
        eval_capacity: CapacityKind = "model.capacity" => capacity;
            aka "eval_capacity_factor" "moe_eval_capacity_factor",
        /// Tokens that share the places of experts; divides train.seq_len.
        group: Count = "train.seq_len" => seq_len; aka "group_size" "moe_group_size",
        /// Width inside an expert.
        expert_ffn: Count = "model.ffn" => ffn; aka "moe_ffn_hidden_size" "moe_intermediate_size",
        /// Layer i, counted from 1, has experts if this divides i; the others are dense.
        moe_every: Count = "1"; aka "moe_layer_freq" "decoder_sparse_step",
        /// Experts of the last model.late_layers layers that have some; 0: as many as in the others.
        late_experts: usize = "0"; aka "pyramid_experts",
        /// How many layers with experts have model.late_experts of them.
        late_layers: Count = "2"; aka "pyramid_layers",
        /// Experts besides, of the same width, that every token takes.
        shared_experts: usize = "0"; aka "n_shared_experts" "num_shared_experts",
        /// Whether the dense part of a layer stays, and its experts add to it.
        residual_experts: bool = "false"; aka "use_residual" "moe_residual",
        /// How much the balancing loss counts, which is 1 where all experts have equal load.
        aux_loss: NonNegative = "0.01";
            aka "moe_aux_loss_coeff" "router_aux_loss_coef" "load_balance_coeff",
        /// Tokens that one balancing loss is taken over.
        aux_scope: AuxScopeKind = "microbatch",
        /// How much the squared log-sum-exp of the router's logits counts.
        z_loss: NonNegative = "0.0"; aka "moe_z_loss_coeff" "router_z_loss_coef",
        /// In training, how far numbers that the router sees are drawn away from what they are, as a share.
        jitter: NonNegative = "0.0"; aka "router_jitter_noise" "moe_input_jitter_eps" "jitter_eps",
        /// A fixed preference for the first experts, for tests and measurements of uneven load: as if expert i, counted from 1,
        /// were i to the power of this as rarely chosen.
        router_bias_zipf: NonNegative = "0.0",
        /// In training, the share of numbers inside an expert that dropout sets to zero.
        expert_dropout: Fraction = "0.0"; aka "expert_dropout_rate" "moe_dropout",
        /// Variance of the initial weights of experts and routers, times the inputs of a weight matrix (Switch:
        /// 0.1); 0: model.init_std, as of other weights.
        expert_init: NonNegative = "0.1 for model.router = \"switch\", else 0" => default_init(router);
            aka "expert_init_scale" "moe_init_scale",
        /// Folder with weights to start from: "hf:DIR" in Hugging Face form, or "run:DIR" of a run. It
        /// sets the model's shape.
        from: Option<Origin> = "none"; aka "load" "init_from" "pretrained" "hf_assets_path",
    }
}

choice! {
    /// Family of networks.
    pub enum ModelKind {
        /// RMSNorm, rotary positions, SwiGLU, grouped-query attention.
        Llama = "llama",
        /// LayerNorm, learned positions, GELU, biases.
        Gpt2 = "gpt2",
        /// Fully connected layers, without attention.
        Mlp = "mlp" later,
        /// Two convolutions and two fully connected layers, for images of digits.
        Cnn = "cnn",
        /// RMSNorm, scores with a bias by distance, ReLU: an encoder of the first half of each sample, and a decoder
        /// that continues it. Initial weights are as published.
        T5 = "t5",
    }
}

impl ModelKind {
    /// Whether it predicts the next token of a sequence.
    pub fn is_language(self) -> bool {
        matches!(self, ModelKind::Llama | ModelKind::Gpt2 | ModelKind::T5)
    }

    /// Whether linear layers usually add a bias.
    pub fn has_biases(self) -> bool {
        !matches!(self, ModelKind::Llama | ModelKind::T5)
    }

    /// Whether the sum that blocks add to can be kept in a wider type.
    pub(crate) fn has_wide_residual(self) -> bool {
        matches!(self, ModelKind::Llama | ModelKind::Gpt2)
    }

    /// Blocks of a model with so many layers.
    pub(crate) fn blocks(self, layers: usize) -> usize {
        if self == ModelKind::T5 { 2 * layers } else { layers }
    }

    fn is_usually_tied(self) -> bool {
        matches!(self, ModelKind::Gpt2 | ModelKind::T5)
    }
}

words!(AttentionKind { Flash = "flash", Materialised = "materialised", });

/// Where initial weights come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// A folder in Hugging Face form.
    HuggingFace(PathBuf),
    /// The folder of a run.
    Run(PathBuf),
}

impl Setting for Origin {
    fn expects() -> String {
        "\"hf:DIR\", a folder with config.json and *.safetensors, or \"run:DIR\", a run's folder"
            .into()
    }
    fn read(value: &Value) -> Option<Self> {
        match value.as_str()?.split_once(':')? {
            (_, "") => None,
            ("hf", dir) => Some(Origin::HuggingFace(dir.into())),
            ("run", dir) => Some(Origin::Run(dir.into())),
            _ => None,
        }
    }
    fn write(&self) -> String {
        match self {
            Origin::HuggingFace(dir) => quoted(&format!("hf:{}", dir.display())),
            Origin::Run(dir) => quoted(&format!("run:{}", dir.display())),
        }
    }
}

impl ModelConfig {
    /// Elements per attention head.
    pub fn head_size(&self) -> usize {
        self.width.get() / self.heads.get()
    }

    pub(crate) fn check(&self, values: &mut Values) {
        self.check_heads(values);
        self.check_gpt2(values);
        self.check_t5(values);
        self.check_experts(values);
        self.check_size(values);
    }

    fn check_heads(&self, values: &mut Values) {
        let (width, heads, kv_heads) = (self.width.get(), self.heads.get(), self.kv_heads.get());
        // A model folder has its own head size, which its reader checks.
        if !self.kind.is_language() || self.from.is_some() {
            return;
        }
        let divides = width % heads == 0;
        values.rule(&["model.heads", "model.width"], divides, || {
            Problem::new(format!("model.heads = {heads} does not divide model.width = {width}"))
                .because("every head takes an equal share of the width")
                .nearest(assignments("model.heads", &divisors_near(width, heads)))
        });
        values.rule(&["model.kv_heads", "model.heads"], heads % kv_heads == 0, || {
            Problem::new(format!(
                "model.kv_heads = {kv_heads} does not divide model.heads = {heads}"
            ))
            .because("every key and value head serves an equal number of query heads")
            .nearest(assignments("model.kv_heads", &divisors_near(heads, kv_heads)))
        });
        let even = self.head_size().is_multiple_of(2) || self.kind != ModelKind::Llama;
        values.rule(&["model.heads", "model.width"], even || !divides, || {
            let size = self.head_size();
            let even_heads = |h: &usize| width % (2 * h) == 0;
            let near: Vec<usize> =
                divisors_near(width, heads).into_iter().filter(even_heads).collect();
            let problem = Problem::new(format!(
                "model.width = {width} ÷ model.heads = {heads} gives heads of odd size {size}"
            ))
            .because("rotary positions rotate pairs of elements");
            if near.is_empty() {
                problem.nearest(format!("model.width = {}", heads * (size + 1)))
            } else {
                problem.nearest(assignments("model.heads", &near))
            }
        });
    }

    fn check_gpt2(&self, values: &mut Values) {
        let kind = self.kind;
        if !matches!(kind, ModelKind::Gpt2 | ModelKind::T5) {
            return;
        }
        let (heads, kv_heads) = (self.heads.get(), self.kv_heads.get());
        values.rule(&["model.kv_heads", "model.kind"], kv_heads == heads, || {
            Problem::new(format!(
                "model.kv_heads = {kv_heads} does not work with model.kind = {kind}"
            ))
            .because(format!(
                "{kind} has no grouped-query attention: every head has its own keys and values"
            ))
            .fix(format!("model.kv_heads = {heads}, or model.kind = \"llama\""))
        });
    }

    fn check_t5(&self, values: &mut Values) {
        let stored = self.attention == AttentionKind::Materialised || self.kind != ModelKind::T5;
        values.rule(&["model.attention", "model.kind"], stored, || {
            Problem::new("model.attention = \"flash\" does not work with model.kind = t5")
                .because("its scores get a bias by distance, and are stored with it")
                .fix("model.attention = \"materialised\", or model.kind = \"llama\"")
        });
    }

    /// Refuses shapes that no machine holds, before anything tries to allocate them.
    fn check_size(&self, values: &mut Values) {
        let found = self.layers.get();
        values.rule(&["model.layers"], found <= MOST_LAYERS, || {
            Problem::new(format!("model.layers = {found} is more than {MOST_LAYERS}"))
                .because("each layer is planned on its own, which would take minutes")
                .nearest(format!("model.layers = {MOST_LAYERS}"))
        });
        let [layers, width, ffn, vocab] =
            [self.layers, self.width, self.ffn, self.vocab].map(|n| n.get() as u128);
        let experts = self.experts.max(self.late_experts) as u128;
        let expert_ffn = self.expert_ffn.get() as u128;
        let inner = ffn + (experts + self.shared_experts as u128) * expert_ffn;
        let layers = self.kind.blocks(layers as usize) as u128;
        let parameters = layers * width * (4 * width + 3 * inner) + 2 * vocab * width;
        let keys = [
            "model.layers",
            "model.width",
            "model.ffn",
            "model.vocab",
            "model.experts",
            "model.expert_ffn",
        ];
        values.rule(&keys, parameters < 1 << 43, || {
            Problem::new(format!("this model has about {:.1e} parameters", parameters as f64))
                .because("the largest that is accepted has 8.8e12")
                .fix("check model.layers, model.width, model.ffn, model.vocab and model.experts")
        });
    }
}

/// The most layers of a model: ten times as many as the deepest that people train.
const MOST_LAYERS: usize = 2048;

fn usual_attention(kind: ModelKind, cp_kind: CpKind) -> AttentionKind {
    match kind {
        ModelKind::T5 => AttentionKind::Materialised,
        _ => cp_kind.usual_attention(),
    }
}

pub(crate) fn default_top_k(router: RouterKind) -> Count {
    let k = if router == RouterKind::Switch { 1 } else { 2 };
    Count::new(k).unwrap_or(Count::MIN)
}

pub(crate) fn default_init(router: RouterKind) -> NonNegative {
    let scale = if router == RouterKind::Switch { 0.1 } else { 0.0 };
    NonNegative::new(scale).expect("it is not negative")
}

/// SwiGLU has three matrices and GELU two, so 8/3 of the width costs as much as 4 times the width.
fn default_ffn(kind: ModelKind, width: Count) -> Count {
    let ffn = match kind {
        ModelKind::Llama => (8 * width.get()).div_ceil(3).next_multiple_of(8),
        ModelKind::Gpt2 | ModelKind::Mlp | ModelKind::Cnn | ModelKind::T5 => 4 * width.get(),
    };
    Count::new(ffn).unwrap_or(width)
}

/// The divisors of `number` next to `wanted`, below and above.
fn divisors_near(number: usize, wanted: usize) -> Vec<usize> {
    let divides = |d: &usize| number.is_multiple_of(*d);
    let below = (1..wanted.min(number + 1)).rev().find(divides);
    let above = (wanted + 1..=number).find(divides);
    below.into_iter().chain(above).collect()
}

/// `key = a or b`, the form in which remedies name values.
pub(crate) fn assignments(key: &str, numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    format!("{key} = {}", numbers.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_among_divisors() {
        assert_eq!(divisors_near(64, 6), [4, 8]);
        assert_eq!(divisors_near(64, 100), [64]);
        assert_eq!(divisors_near(7, 2), [1, 7]);
    }

    #[test]
    fn feed_forward_widths_follow_the_family() {
        let width = Count::new(128).expect("not zero");
        assert_eq!(default_ffn(ModelKind::Llama, width).get(), 344);
        assert_eq!(default_ffn(ModelKind::Gpt2, width).get(), 512);
    }
}
