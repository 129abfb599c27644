//! `config.json` to and from a [`ModelSpec`].
//!
//! The file describes many variants of an architecture; a reader that ignored unknown keys would
//! compute something different from the model. So the keys that change the mathematics are listed
//! ([`COMMON_RULES`], [`GPT_RULES`], [`LLAMA_RULES`]) with the values that are implemented, and any
//! other value is refused by name. Keys outside those lists do not change what the weights compute;
//! those that users of the model need are kept ([`KeptKeys`]).

use std::path::Path;

use phalanx_ir::ops::RopeScaling;
use phalanx_sys::{StandIn, read_text};
use serde_json::{Map, Value, json};

use super::error::HfError;
use super::keys::{Keys, Rule, rule, shown};
use super::mixtral;
use super::spec::{GptSpec, LlamaSpec, ModelSpec, RopeSpec};
use super::t5;
use super::tensor::Stored;

/// More bytes than any configuration has.
const LONGEST_CONFIG: u64 = 16 << 20;

/// Reads the configuration file of a model folder.
pub fn read_config(path: &Path) -> Result<ModelSpec, HfError> {
    let text = read_text(path, LONGEST_CONFIG).map_err(HfError::Read)?;
    parse_config(&text, path)
}

/// Reads a configuration from its text; `path` is where it came from, for messages.
pub fn parse_config(text: &str, path: &Path) -> Result<ModelSpec, HfError> {
    let map = &object(text, path)?;
    let keys = Keys { path, within: "", map };
    let Some(kind) = keys.get("model_type") else {
        return Err(keys.missing("model_type", "\"gpt2\", \"llama\", \"mixtral\" or \"t5\""));
    };
    keys.enforce(COMMON_RULES)?;
    match kind.as_str() {
        Some("gpt2") => parse_gpt(&keys).map(ModelSpec::Gpt),
        Some("llama") => parse_llama(&keys).map(ModelSpec::Llama),
        Some("mixtral") => mixtral::parse(&keys).map(ModelSpec::Mixtral),
        Some("t5") => t5::parse(&keys).map(ModelSpec::T5),
        _ => Err(keys.unsupported("model_type", kind, "\"gpt2\", \"llama\", \"mixtral\", \"t5\"")),
    }
}

fn object(text: &str, path: &Path) -> Result<Map<String, Value>, HfError> {
    if let Some(found) = StandIn::of(text.as_bytes()) {
        return Err(HfError::Read(found.error(path)));
    }
    let value: Value = serde_json::from_str(text)
        .map_err(|e| HfError::corrupt(path, e.to_string(), "a JSON object"))?;
    match value {
        Value::Object(map) => Ok(map),
        other => {
            let found = format!("a JSON document that is {}", shown(&other));
            Err(HfError::corrupt(path, found, "a JSON object"))
        }
    }
}

/// Settings of a `config.json` that do not change what the weights compute, but that users of
/// the model need: they are kept from the folder that weights came from to the one they go to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptKeys(Map<String, Value>);

/// The dropout rates, by architecture.
const GPT_DROPOUT: [&str; 3] = ["resid_pdrop", "embd_pdrop", "attn_pdrop"];
const LLAMA_DROPOUT: &str = "attention_dropout";
const T5_DROPOUT: &str = "dropout_rate";

const KEPT: [&str; 11] = [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "initializer_range",
    "initializer_factor",
    GPT_DROPOUT[0],
    GPT_DROPOUT[1],
    GPT_DROPOUT[2],
    LLAMA_DROPOUT,
    T5_DROPOUT,
];

/// Every key of a dropout rate.
fn rates() -> impl Iterator<Item = &'static str> {
    GPT_DROPOUT.into_iter().chain([LLAMA_DROPOUT, T5_DROPOUT])
}

impl KeptKeys {
    /// Reads them from the configuration file of a model folder.
    pub fn read(path: &Path) -> Result<Self, HfError> {
        let text = std::fs::read_to_string(path).map_err(|e| HfError::read(path, e))?;
        let mut map = object(&text, path)?;
        let keys = Keys { path, within: "", map: &map };
        for key in rates() {
            keys.share(key)?;
        }
        map.retain(|key, _| KEPT.contains(&key.as_str()));
        Ok(Self(map))
    }

    /// The dropout that the model was trained with, if it was trained with any: the keys and their
    /// values as text, and the rate if it is the same for all.
    pub fn dropout(&self) -> Option<(String, Option<f64>)> {
        let rates: Vec<(&String, f64)> = (self.0.iter())
            .filter(|(key, _)| rates().any(|rate| rate == *key))
            .filter_map(|(key, value)| Some((key, value.as_f64()?)))
            .collect();
        let first = rates.first()?.1;
        let text: Vec<String> = rates.iter().map(|(key, rate)| format!("{key} = {rate}")).collect();
        let same = rates.iter().all(|(_, rate)| *rate == first);
        let any = rates.iter().any(|(_, rate)| *rate > 0.0);
        any.then(|| (text.join(", "), same.then_some(first)))
    }
}

/// A specification as the text of a configuration file, which [`parse_config`] reads back.
pub fn config_text(spec: &ModelSpec) -> String {
    write_config(spec, Stored::F32, &KeptKeys::default())
}

/// The text of a configuration file.
///
/// Rotary settings are written in the older spelling, which every version of `transformers` reads.
/// Dropout is zero and token ids are absent unless they were kept: a model does not know its tokenizer.
pub(super) fn write_config(spec: &ModelSpec, stored: Stored, kept: &KeptKeys) -> String {
    let mut value = match spec {
        ModelSpec::Gpt(spec) => gpt_json(spec),
        ModelSpec::Llama(spec) => llama_json(spec),
        ModelSpec::Mixtral(spec) => mixtral::json(spec),
        ModelSpec::T5(spec) => t5::json(spec),
    };
    value["torch_dtype"] = json!(stored.torch_name());
    value["bos_token_id"] = Value::Null;
    value["eos_token_id"] = Value::Null;
    for (key, kept) in &kept.0 {
        value[key] = kept.clone();
    }
    format!("{value:#}\n")
}

const COMMON_RULES: &[Rule] = &[
    rule("quantization_config", "none", |_| false),
    rule("sliding_window", "none", |_| false),
    rule("layer_types", "\"full_attention\" for every layer", |v| {
        v.as_array().is_some_and(|types| types.iter().all(|t| t == "full_attention"))
    }),
    rule("per_layer_config", "none", is_empty),
    rule("pruned_heads", "none", is_empty),
    rule("auto_map", "none: code that comes with a model is not run", is_empty),
];

/// The rules of models without an encoder.
const ALONE_RULES: &[Rule] = &[
    rule("is_encoder_decoder", "false", is_false),
    rule("add_cross_attention", "false", is_false),
];

const GPT_RULES: &[Rule] = &[
    rule(
        "activation_function",
        "\"gelu_new\" and \"gelu_pytorch_tanh\", which are the same",
        |v| v == "gelu_new" || v == "gelu_pytorch_tanh",
    ),
    rule("scale_attn_weights", "true", |v| v == true),
    rule("scale_attn_by_inverse_layer_idx", "false", is_false),
];

const LLAMA_RULES: &[Rule] = &[
    rule("attention_bias", "false", is_false),
    rule("mlp_bias", "false", is_false),
    rule("hidden_act", "\"silu\" or its other name \"swish\"", |v| v == "silu" || v == "swish"),
    rule("partial_rotary_factor", "1", is_one),
];

const ROPE_RULES: &[Rule] = &[rule("partial_rotary_factor", "1", is_one)];

/// The keys of rotary settings that are understood; any other would change the frequencies.
const ROPE_KEYS: [&str; 8] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
];

pub(super) fn is_false(value: &Value) -> bool {
    value == false
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty)
}

fn parse_gpt(keys: &Keys<'_>) -> Result<GptSpec, HfError> {
    keys.enforce(ALONE_RULES)?;
    keys.enforce(GPT_RULES)?;
    let (width, heads) = (keys.need("n_embd")?, keys.need("n_head")?);
    keys.multiple("n_embd", width, "n_head", heads)?;
    Ok(GptSpec {
        layers: keys.layers("n_layer")?,
        width,
        heads,
        ffn: keys.size("n_inner")?.unwrap_or(4 * width),
        vocab: keys.need("vocab_size")?,
        context: keys.size("n_positions")?.unwrap_or(1024),
        norm_eps: keys.positive("layer_norm_epsilon")?.unwrap_or(1e-5),
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(true),
    })
}

pub(super) fn parse_llama(keys: &Keys<'_>) -> Result<LlamaSpec, HfError> {
    keys.enforce(ALONE_RULES)?;
    keys.enforce(LLAMA_RULES)?;
    let (width, heads) = (keys.need("hidden_size")?, keys.need("num_attention_heads")?);
    keys.multiple("hidden_size", width, "num_attention_heads", heads)?;
    let kv_heads = keys.size("num_key_value_heads")?.unwrap_or(heads);
    keys.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
    let head_dim = keys.size("head_dim")?.unwrap_or(width / heads);
    if !head_dim.is_multiple_of(2) {
        let found = head_dim.to_string();
        return Err(keys.bad("head_dim", found, "an even number: rotary positions rotate pairs"));
    }
    let context = keys.size("max_position_embeddings")?.unwrap_or(2048);
    Ok(LlamaSpec {
        layers: keys.layers("num_hidden_layers")?,
        width,
        heads,
        kv_heads,
        head_dim,
        ffn: keys.need("intermediate_size")?,
        vocab: keys.need("vocab_size")?,
        context,
        norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope: parse_rope(keys, context)?,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
    })
}

/// Rotary settings in either spelling: `rope_theta` with `rope_scaling`, or everything in
/// `rope_parameters`. When a file has both, the former's scaling counts, as in `transformers`.
fn parse_rope(keys: &Keys<'_>, context: usize) -> Result<RopeSpec, HfError> {
    let outer_theta = keys.positive("rope_theta")?.unwrap_or(10_000.0);
    let given = |key: &'static str| {
        let value = keys.get(key).filter(|v| !is_empty(v))?;
        Some((key, value))
    };
    let Some((within, value)) = given("rope_scaling").or_else(|| given("rope_parameters")) else {
        return Ok(RopeSpec { theta: outer_theta, scaling: RopeScaling::None });
    };
    let Value::Object(map) = value else {
        return Err(keys.bad(within, shown(value), "an object of rotary settings"));
    };
    let rope = Keys { path: keys.path, within, map };
    let unknown =
        map.iter().find(|(key, value)| !value.is_null() && !ROPE_KEYS.contains(&key.as_str()));
    let kind = rope.get("rope_type").or_else(|| rope.get("type"));
    let scaling = match kind.map(|k| (k, k.as_str())) {
        None | Some((_, Some("default"))) => RopeScaling::None,
        Some((_, Some("linear"))) => RopeScaling::Linear { factor: rope.need_positive("factor")? },
        Some((_, Some("llama3"))) => parse_llama3(keys, &rope, context)?,
        Some((kind, _)) => {
            let key = if map.contains_key("rope_type") { "rope_type" } else { "type" };
            return Err(rope.unsupported(key, kind, "\"default\", \"linear\", \"llama3\""));
        }
    };
    if let Some((key, value)) = unknown {
        return Err(rope.unsupported(key, value, &ROPE_KEYS.join(", ")));
    }
    rope.enforce(ROPE_RULES)?;
    Ok(RopeSpec { theta: rope.positive("rope_theta")?.unwrap_or(outer_theta), scaling })
}

fn parse_llama3(keys: &Keys<'_>, rope: &Keys<'_>, context: usize) -> Result<RopeScaling, HfError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let low = rope.need_positive("low_freq_factor")?;
    let high = rope.need_positive("high_freq_factor")?;
    if high <= low {
        let expected = format!("more than `low_freq_factor` = {low}");
        return Err(rope.bad("high_freq_factor", high.to_string(), &expected));
    }
    // Like `transformers`: the key outside the rotary settings counts more than the one inside.
    let original = match keys.size(ORIGINAL)? {
        Some(outside) => outside,
        None => rope.size(ORIGINAL)?.unwrap_or(context),
    };
    Ok(RopeScaling::Llama3 {
        factor: rope.need_positive("factor")?,
        low,
        high,
        original: original as f64,
    })
}

fn gpt_json(spec: &GptSpec) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": spec.layers,
        "n_embd": spec.width,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "vocab_size": spec.vocab,
        "n_positions": spec.context,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": spec.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    })
}

pub(super) fn llama_json(spec: &LlamaSpec) -> Value {
    let scaling = match spec.rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low, high, original } => {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original as u64,
            })
        }
    };
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": false,
        "mlp_bias": false,
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.tied,
    })
}
