//! `config.json` of Mixtral: LLaMA's keys, and those of its experts.

use std::path::Path;

use serde_json::{Value, json};

use super::config::{llama_json, parse_llama};
use super::error::HfError;
use super::keys::{Keys, Rule, rule};
use super::spec::{LlamaSpec, MixtralSpec};
use crate::experts::LateExperts;

const RULES: &[Rule] = &[
    rule("router_jitter_noise", "0", |value| value.as_f64() == Some(0.0)),
    rule("shared_expert_intermediate_size", "none", |_| false),
];

/// Which layers have experts, and the width of the others: for the weights of a run.
const EVERY: &str = "moe_every";
const DENSE: &str = "dense_intermediate_size";
/// Experts that all tokens take, and whether the dense part stays: the first is a key of other models there.
const SHARED: &str = "n_shared_experts";
const RESIDUAL: &str = "residual_experts";
/// Whether gates add up to one: a key of other models there.
const NORMALISED: &str = "norm_topk_prob";
/// How many experts the last layers have, and how many such layers there are.
const LATE_EXPERTS: &str = "late_experts";
const LATE_LAYERS: &str = "late_expert_layers";
/// Whether logits are noisy in training.
const NOISY: &str = "noisy_gating";

pub(super) fn parse(keys: &Keys<'_>) -> Result<MixtralSpec, HfError> {
    keys.enforce(RULES)?;
    let base = parse_llama(keys)?;
    let (experts, top_k) = (keys.need("num_local_experts")?, keys.need("num_experts_per_tok")?);
    if top_k > experts {
        let expected = format!("at most `num_local_experts` = {experts}");
        return Err(keys.bad("num_experts_per_tok", top_k.to_string(), &expected));
    }
    let (expert_ffn, dense) = (base.ffn, keys.size(DENSE)?);
    let base = LlamaSpec { ffn: dense.unwrap_or(expert_ffn), ..base };
    let every = keys.size(EVERY)?.unwrap_or(1);
    let normalised = keys.flag(NORMALISED)?.unwrap_or(true);
    let shared = keys.count(SHARED)?;
    let residual = keys.flag(RESIDUAL)?.unwrap_or(false);
    let noisy = keys.flag(NOISY)?.unwrap_or(false);
    let (count, layers) = (keys.count(LATE_EXPERTS)?, keys.count(LATE_LAYERS)?);
    Ok(MixtralSpec {
        base,
        experts,
        top_k,
        expert_ffn,
        every,
        shared,
        residual,
        normalised,
        noisy,
        late: (count > 0 && layers > 0).then_some(LateExperts { layers, count }),
    })
}

/// Refuses what a folder of Mixtral cannot say: its readers would compute something else.
pub(super) fn exchangeable(spec: &MixtralSpec, path: &Path) -> Result<(), HfError> {
    let unsupported = |key: &str, found: String, supported: &str| {
        let (path, key, supported) = (path.into(), key.to_owned(), supported.to_owned());
        Err(HfError::Unsupported { path, key, found, supported })
    };
    if spec.every != 1 {
        let found = format!("{}", spec.every);
        return unsupported(EVERY, found, "1: Mixtral has experts in every layer");
    }
    if spec.shared > 0 {
        return unsupported(SHARED, spec.shared.to_string(), "0: Mixtral has no shared experts");
    }
    if spec.residual {
        let supported = "false: the experts of Mixtral take the place of the dense part";
        return unsupported(RESIDUAL, "true".to_owned(), supported);
    }
    if !spec.normalised {
        let supported = "true: the gates of Mixtral add up to one, those of switch do not";
        return unsupported(NORMALISED, "false".to_owned(), supported);
    }
    if let Some(late) = spec.late {
        let supported = "0: all layers of Mixtral have as many experts";
        return unsupported(LATE_EXPERTS, late.count.to_string(), supported);
    }
    if spec.noisy {
        let supported = "false: the routers of Mixtral have no noise";
        return unsupported(NOISY, "true".to_owned(), supported);
    }
    Ok(())
}

pub(super) fn json(spec: &MixtralSpec) -> Value {
    let mut value = llama_json(&spec.base);
    for (key, of_experts) in [
        ("architectures", json!(["MixtralForCausalLM"])),
        ("model_type", json!("mixtral")),
        ("intermediate_size", json!(spec.expert_ffn)),
        ("num_local_experts", json!(spec.experts)),
        ("num_experts_per_tok", json!(spec.top_k)),
        ("router_jitter_noise", json!(0.0)),
        ("sliding_window", Value::Null),
    ] {
        value[key] = of_experts;
    }
    if spec.base.ffn != spec.expert_ffn {
        value[DENSE] = json!(spec.base.ffn);
    }
    if spec.every != 1 {
        value[EVERY] = json!(spec.every);
    }
    if spec.shared > 0 {
        value[SHARED] = json!(spec.shared);
    }
    if spec.residual {
        value[RESIDUAL] = json!(true);
    }
    if !spec.normalised {
        value[NORMALISED] = json!(false);
    }
    if spec.noisy {
        value[NOISY] = json!(true);
    }
    if let Some(late) = spec.late {
        value[LATE_EXPERTS] = json!(late.count);
        value[LATE_LAYERS] = json!(late.layers);
    }
    value
}
