//! The names and layouts of parameters here and at Hugging Face.
//!
//! Our weights are `[in, out]`. LLaMA's linear layers are stored `[out, in]` and are transposed;
//! GPT-2's are already `[in, out]`, but its query, key and value are concatenated in one tensor.
//! Every conversion in either direction follows the one table that [`params`] returns.

use super::spec::{GptSpec, LlamaSpec, MixtralSpec, ModelSpec};
use super::t5;
use crate::experts::ExpertLayers;

/// One of our parameters, or one of its matrices, and where Hugging Face keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct HfParam {
    /// Our name.
    pub name: String,
    /// Our shape; a weight is `[in, out]`.
    pub shape: Vec<usize>,
    /// The name of the tensor that holds it in a Hugging Face file, with the customary prefix.
    pub hf_name: String,
    /// How it is stored in that tensor.
    pub storage: Storage,
}

/// How one of our parameters is stored in a Hugging Face tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// It is the tensor.
    Whole,
    /// It is the transpose of the tensor.
    Transposed,
    /// It is one of equal parts along the tensor's last dim.
    Part {
        /// Which part.
        part: usize,
        /// Of how many.
        of: usize,
    },
    /// The tensor is the transpose of one of its matrices: the first dim counts them. Its other
    /// matrices have tensors of their own.
    Matrix {
        /// Which matrix.
        number: usize,
    },
}

/// The prefixes that a file may leave out: a bare base model is saved without them.
pub const PREFIXES: [&str; 2] = ["transformer.", "model."];

/// The tensor that holds the head's weights when it has its own.
pub const HF_HEAD: &str = "lm_head.weight";

/// Every parameter of a model, in the order in which the model applies them; one that has several
/// tensors at Hugging Face comes once for each.
pub fn params(spec: &ModelSpec) -> Vec<HfParam> {
    match spec {
        ModelSpec::Gpt(spec) => gpt(spec),
        ModelSpec::Llama(spec) => llama(spec, feed_forward),
        ModelSpec::Mixtral(spec) => llama(&spec.base, |base, layer| mixtral(spec, base, layer)),
        ModelSpec::T5(spec) => t5::params(spec),
    }
}

/// Whether a tensor is a constant that some versions of `transformers` stored with the weights
/// (causal masks, rotary tables), which can be computed from the configuration, or one that no part of
/// the model reads. They are not read here.
pub fn is_known_buffer(spec: &ModelSpec, hf_name: &str) -> bool {
    let known: &[&str] = match spec {
        ModelSpec::Gpt(_) => &["attn.bias", "attn.masked_bias"],
        ModelSpec::Llama(_) | ModelSpec::Mixtral(_) => &["rotary_emb.inv_freq"],
        ModelSpec::T5(_) => return hf_name == t5::UNREAD,
    };
    let bare = without_prefix(hf_name);
    known.iter().any(|end| {
        bare.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    })
}

/// The names under which a file may hold the embedding once more.
pub fn copies_of_embedding(spec: &ModelSpec) -> Vec<&'static str> {
    let tables = if let ModelSpec::T5(_) = spec { &t5::COPIES[..] } else { &[] };
    tables.iter().copied().chain(spec.tied().then_some(HF_HEAD)).collect()
}

/// A Hugging Face name without the prefix that files may leave out.
pub fn without_prefix(hf_name: &str) -> &str {
    PREFIXES.iter().find_map(|prefix| hf_name.strip_prefix(prefix)).unwrap_or(hf_name)
}

impl HfParam {
    /// The shape of the Hugging Face tensor.
    pub fn hf_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        match self.storage {
            Storage::Whole => {}
            Storage::Transposed => shape.reverse(),
            Storage::Matrix { .. } => {
                shape.remove(0);
                shape.reverse();
            }
            Storage::Part { of, .. } => {
                if let Some(last) = shape.last_mut() {
                    *last *= of;
                }
            }
        }
        shape
    }

    pub(super) fn new(
        name: impl Into<String>,
        shape: &[usize],
        hf_name: impl Into<String>,
    ) -> Self {
        HfParam {
            name: name.into(),
            shape: shape.to_vec(),
            hf_name: hf_name.into(),
            storage: Storage::Whole,
        }
    }

    pub(super) fn at(mut self, storage: Storage) -> Self {
        self.storage = storage;
        self
    }
}

/// The parameters of a LLaMA model, whose layers end with those of a feed-forward part.
fn llama(spec: &LlamaSpec, inner: impl Fn(&LlamaSpec, usize) -> Vec<HfParam>) -> Vec<HfParam> {
    let d = spec.width;
    let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let mut out = vec![HfParam::new("embed", &[spec.vocab, d], "model.embed_tokens.weight")];
    for i in 0..spec.layers {
        let vector = |ours: &str, theirs: &str| {
            let hf_name = format!("model.layers.{i}.{theirs}.weight");
            HfParam::new(format!("blocks.{i}.{ours}"), &[d], hf_name)
        };
        out.extend([
            vector("norm1", "input_layernorm"),
            linear(i, "attn.q", "self_attn.q_proj", [d, q]),
            linear(i, "attn.k", "self_attn.k_proj", [d, kv]),
            linear(i, "attn.v", "self_attn.v_proj", [d, kv]),
            linear(i, "attn.out", "self_attn.o_proj", [q, d]),
            vector("norm2", "post_attention_layernorm"),
        ]);
        out.extend(inner(spec, i));
    }
    out.push(HfParam::new("norm", &[d], "model.norm.weight"));
    out.extend((!spec.tied).then(|| head(d, spec.vocab)));
    out
}

/// A linear layer of a LLaMA block, by its number.
fn linear(layer: usize, ours: &str, theirs: &str, shape: [usize; 2]) -> HfParam {
    let hf_name = format!("model.layers.{layer}.{theirs}.weight");
    HfParam::new(format!("blocks.{layer}.{ours}"), &shape, hf_name).at(Storage::Transposed)
}

fn feed_forward(spec: &LlamaSpec, layer: usize) -> Vec<HfParam> {
    swiglu(layer, "mlp", "mlp", [spec.width, spec.ffn]).into()
}

fn swiglu(layer: usize, ours: &str, theirs: &str, [d, f]: [usize; 2]) -> [HfParam; 3] {
    [("gate", [d, f]), ("up", [d, f]), ("down", [f, d])].map(|(name, shape)| {
        linear(layer, &format!("{ours}.{name}"), &format!("{theirs}.{name}_proj"), shape)
    })
}

/// Each matrix of each expert is a tensor of its own there; here the experts of a layer are one.
fn mixtral(spec: &MixtralSpec, base: &LlamaSpec, layer: usize) -> Vec<HfParam> {
    let MixtralSpec { every, experts: count, late, .. } = *spec;
    let layers = ExpertLayers { layers: base.layers, every, count, late };
    let Some(count) = layers.of(layer) else { return feed_forward(base, layer) };
    let (d, f) = (base.width, spec.expert_ffn);
    let within = "block_sparse_moe";
    let router = linear(layer, "experts.router", &format!("{within}.gate"), [d, count]);
    let mut out = vec![router];
    if spec.noisy {
        out.push(linear(layer, "experts.noise", &format!("{within}.noise"), [d, count]));
    }
    for (ours, theirs, rows, columns) in
        [("gate", "w1", d, f), ("up", "w3", d, f), ("down", "w2", f, d)]
    {
        out.extend((0..count).map(|number| {
            let hf_name = format!("model.layers.{layer}.{within}.experts.{number}.{theirs}.weight");
            let name = format!("blocks.{layer}.experts.{ours}");
            HfParam::new(name, &[count, rows, columns], hf_name).at(Storage::Matrix { number })
        }));
    }
    if spec.shared > 0 {
        out.extend(swiglu(layer, "shared", "mlp.shared_experts", [d, spec.shared * f]));
    }
    if spec.residual {
        out.extend(feed_forward(base, layer));
    }
    out
}

fn gpt(spec: &GptSpec) -> Vec<HfParam> {
    let (d, f) = (spec.width, spec.ffn);
    let mut out = vec![
        HfParam::new("embed", &[spec.vocab, d], "transformer.wte.weight"),
        HfParam::new("pos", &[spec.context, d], "transformer.wpe.weight"),
    ];
    for i in 0..spec.layers {
        let hf_name = |rest: &str| format!("transformer.h.{i}.{rest}");
        let norm = |ours: &str, theirs: &str| {
            [("gain", "weight"), ("bias", "bias")].map(|(our_end, end)| {
                let name = format!("blocks.{i}.{ours}.{our_end}");
                HfParam::new(name, &[d], hf_name(&format!("{theirs}.{end}")))
            })
        };
        let linear = |ours: &str, theirs: &str, from: usize, to: usize| {
            let name = format!("blocks.{i}.{ours}");
            let weight = hf_name(&format!("{theirs}.weight"));
            let bias = hf_name(&format!("{theirs}.bias"));
            [
                HfParam::new(name.clone(), &[from, to], weight),
                HfParam::new(format!("{name}_bias"), &[to], bias),
            ]
        };
        out.extend(norm("norm1", "ln_1"));
        for (part, ours) in ["attn.q", "attn.k", "attn.v"].into_iter().enumerate() {
            let storage = Storage::Part { part, of: 3 };
            out.extend(linear(ours, "attn.c_attn", d, d).map(|p| p.at(storage)));
        }
        out.extend(linear("attn.out", "attn.c_proj", d, d));
        out.extend(norm("norm2", "ln_2"));
        out.extend(linear("mlp.up", "mlp.c_fc", d, f));
        out.extend(linear("mlp.down", "mlp.c_proj", f, d));
    }
    out.push(HfParam::new("norm.gain", &[d], "transformer.ln_f.weight"));
    out.push(HfParam::new("norm.bias", &[d], "transformer.ln_f.bias"));
    out.extend((!spec.tied).then(|| head(d, spec.vocab)));
    out
}

fn head(width: usize, vocab: usize) -> HfParam {
    HfParam::new("head", &[width, vocab], HF_HEAD).at(Storage::Transposed)
}
