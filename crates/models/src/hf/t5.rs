//! T5 at Hugging Face: the keys of its `config.json`, and the names of its tensors.
//!
//! One table of words, `shared`, is stored once; the encoder and the decoder read it, and the head if it is tied.
//! The table of distances that all blocks of a stack share is stored with the first of them.

use serde_json::{Value, json};

use super::config::is_false;
use super::error::HfError;
use super::keys::{Keys, Rule, rule};
use super::names::{HF_HEAD, HfParam, Storage};
use super::spec::T5Spec;

/// The two forms of the feed-forward part.
const PLAIN: &str = "relu";
const GATED: &str = "gated-gelu";
const FORM: &str = "feed_forward_proj";

/// Whether what the head reads is scaled.
const SCALED: &str = "scale_decoder_outputs";

/// What `transformers` derives from the form, and writes too.
const PLAIN_RULES: &[Rule] = &[
    rule("dense_act_fn", "\"relu\", as of \"relu\"", |value| value == PLAIN),
    rule("is_gated_act", "false, as of \"relu\"", is_false),
];
const GATED_RULES: &[Rule] = &[
    rule("dense_act_fn", "\"gelu_new\", as of \"gated-gelu\"", |value| value == "gelu_new"),
    rule("is_gated_act", "true, as of \"gated-gelu\"", |value| value == true),
];

const RULES: &[Rule] = &[
    rule("is_encoder_decoder", "true", |value| value == true),
    rule("is_decoder", "false", is_false),
];

pub(super) fn parse(keys: &Keys<'_>) -> Result<T5Spec, HfError> {
    keys.enforce(RULES)?;
    let layers = keys.layers("num_layers")?;
    if let Some(other) = keys.size("num_decoder_layers")?.filter(|&other| other != layers) {
        let expected = format!("{layers}, as many as `num_layers`");
        return Err(keys.bad("num_decoder_layers", other.to_string(), &expected));
    }
    let gated = match keys.get(FORM).map(|form| (form, form.as_str())) {
        None | Some((_, Some(PLAIN))) => false,
        Some((_, Some(GATED))) => true,
        Some((form, _)) => {
            return Err(keys.unsupported(FORM, form, "\"relu\", \"gated-gelu\""));
        }
    };
    keys.enforce(if gated { GATED_RULES } else { PLAIN_RULES })?;
    let tied = keys.flag("tie_word_embeddings")?.unwrap_or(true);
    let (buckets, far) = distances(keys)?;
    Ok(T5Spec {
        layers,
        width: keys.need("d_model")?,
        heads: keys.need("num_heads")?,
        head_dim: keys.size("d_kv")?.unwrap_or(64),
        ffn: keys.need("d_ff")?,
        vocab: keys.need("vocab_size")?,
        buckets,
        far,
        norm_eps: keys.positive("layer_norm_epsilon")?.unwrap_or(1e-6),
        tied,
        // Older files say both in one key.
        scaled: keys.flag(SCALED)?.unwrap_or(tied),
        gated,
    })
}

/// How many kinds of distances there are, and from which on all are alike.
fn distances(keys: &Keys<'_>) -> Result<(usize, usize), HfError> {
    const KINDS: &str = "relative_attention_num_buckets";
    const FAR: &str = "relative_attention_max_distance";
    let buckets = keys.size(KINDS)?.unwrap_or(32);
    if !buckets.is_multiple_of(4) {
        return Err(keys.bad(KINDS, buckets.to_string(), "a multiple of 4"));
    }
    let far = keys.size(FAR)?.unwrap_or(128);
    if far <= buckets / 2 {
        let expected = format!("more than half of `{KINDS}`, {}", buckets / 2);
        return Err(keys.bad(FAR, far.to_string(), &expected));
    }
    Ok((buckets, far))
}

pub(super) fn json(spec: &T5Spec) -> Value {
    json!({
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": true,
        "num_layers": spec.layers,
        "num_decoder_layers": spec.layers,
        "d_model": spec.width,
        "num_heads": spec.heads,
        "d_kv": spec.head_dim,
        "d_ff": spec.ffn,
        FORM: if spec.gated { GATED } else { PLAIN },
        "vocab_size": spec.vocab,
        "relative_attention_num_buckets": spec.buckets,
        "relative_attention_max_distance": spec.far,
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        SCALED: spec.scaled,
        "dropout_rate": 0.0,
    })
}

/// Copies of the table of words that some writers store too.
pub(super) const COPIES: [&str; 2] = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];

/// A table that no block reads: the decoder knows no distances to what the encoder reads. Some files have it.
pub(super) const UNREAD: &str =
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";

/// Every parameter, in the model's order.
pub(super) fn params(spec: &T5Spec) -> Vec<HfParam> {
    let (words, kinds) = ([spec.vocab, spec.width], [spec.buckets, spec.heads]);
    let mut out = vec![HfParam::new("embed", &words, "shared.weight")];
    for stack in ["encoder", "decoder"] {
        let table = format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
        out.push(HfParam::new(format!("{stack}.bias"), &kinds, table));
        out.extend((0..spec.layers).flat_map(|layer| block(spec, stack, layer)));
        let last = if stack == "encoder" { "encoder.norm" } else { "norm" };
        out.push(HfParam::new(last, &[spec.width], format!("{stack}.final_layer_norm.weight")));
    }
    out.extend(
        (!spec.tied).then(|| {
            HfParam::new("head", &[spec.width, spec.vocab], HF_HEAD).at(Storage::Transposed)
        }),
    );
    out
}

/// A block has its parts in a list, each with the norm before it.
fn block(spec: &T5Spec, stack: &str, layer: usize) -> Vec<HfParam> {
    let mut parts = vec![("SelfAttention", "attn"), ("DenseReluDense", "mlp")];
    if stack == "decoder" {
        parts.insert(1, ("EncDecAttention", "cross"));
    }
    let mut out = Vec::new();
    for (number, (theirs, ours)) in parts.into_iter().enumerate() {
        let within = format!("{stack}.block.{layer}.layer.{number}");
        let name = |rest: String| format!("{stack}.blocks.{layer}.{rest}");
        let norm = name(format!("norm{}", number + 1));
        out.push(HfParam::new(norm, &[spec.width], format!("{within}.layer_norm.weight")));
        let products = if ours == "mlp" { feed_forward(spec) } else { attention(spec) };
        out.extend(products.into_iter().map(|(our_end, end, shape)| {
            let weight = format!("{within}.{theirs}.{end}.weight");
            HfParam::new(name(format!("{ours}.{our_end}")), &shape, weight).at(Storage::Transposed)
        }));
    }
    out
}

/// A linear layer: its name here and there, and its shape here.
type Linear = (&'static str, &'static str, [usize; 2]);

fn attention(T5Spec { width, heads, head_dim, .. }: &T5Spec) -> Vec<Linear> {
    let (width, inner) = (*width, heads * head_dim);
    let into = ["q", "k", "v"].map(|part| (part, part, [width, inner]));
    into.into_iter().chain([("out", "o", [inner, width])]).collect()
}

fn feed_forward(spec: &T5Spec) -> Vec<Linear> {
    let (up, down) = ([spec.width, spec.ffn], [spec.ffn, spec.width]);
    match spec.gated {
        true => vec![("gate", "wi_0", up), ("up", "wi_1", up), ("down", "wo", down)],
        false => vec![("up", "wi", up), ("down", "wo", down)],
    }
}
