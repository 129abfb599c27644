//! Configurations: both spellings of rotary settings, and everything that is refused.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_ir::DType;
use phalanx_models::LateExperts;
use phalanx_models::hf::{
    GptSpec, HfError, KeptKeys, LlamaSpec, MixtralSpec, ModelSpec, RopeScaling, T5Spec,
    WeightTensor, config_text, parse_config, read_config, save,
};
use serde_json::{Value, json};

use crate::fixtures::{case, error, numbers, read_raw, root, scratch};

fn parse(value: &Value) -> Result<ModelSpec, HfError> {
    parse_config(&value.to_string(), Path::new("dir/config.json"))
}

fn llama(value: &Value) -> LlamaSpec {
    match parse(value) {
        Ok(ModelSpec::Llama(spec)) => spec,
        other => panic!("{other:?}"),
    }
}

fn llama_config() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 36,
    })
}

fn gpt_config() -> Value {
    json!({"model_type": "gpt2", "vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 4})
}

#[test]
fn rotary_frequencies_are_those_of_transformers_in_every_spelling() {
    let table = std::fs::read_to_string(root().join("rope.json")).unwrap();
    let table: Vec<Value> = serde_json::from_str(&table).unwrap();
    assert!(table.len() >= 10);
    for row in &table {
        let spec = llama(&row["config"]);
        let found = spec.rope.rotary().frequencies(spec.head_dim);
        let expected = row["inv_freq"].as_array().unwrap();
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            let e = e.as_f64().unwrap();
            assert!((f - e).abs() < 1e-5 * e, "{}: {f} {e}", row["config"]);
        }
    }
}

#[test]
fn rotary_frequencies_of_the_fixtures_match_in_f64() {
    for name in ["llama_gqa", "llama_hd6", "llama_tied", "llama_rope_old"] {
        let Ok(ModelSpec::Llama(spec)) = read_config(&case(name).join("config.json")) else {
            panic!("{name}");
        };
        let oracle = read_raw(&case(name).join("oracle_f64.safetensors"));
        let (_, expected) = numbers(&oracle, "inv_freq");
        assert!(error(&spec.rope.rotary().frequencies(spec.head_dim), &expected) < 1e-15);
    }
}

#[test]
fn the_two_spellings_describe_one_model() {
    let old = read_config(&case("llama_rope_old").join("config.json")).unwrap();
    let new = read_config(&case("llama_rope_new").join("config.json")).unwrap();
    assert_eq!(old, new);
    let ModelSpec::Llama(spec) = old else { panic!("{old:?}") };
    assert_eq!(spec.rope.theta, 500.0);
    let expected = RopeScaling::Llama3 { factor: 4.0, low: 1.0, high: 4.0, original: 32.0 };
    assert_eq!(spec.rope.scaling, expected);
}

#[test]
fn sizes_and_their_defaults() {
    let spec = read_config(&case("gpt2_bare").join("config.json")).unwrap();
    let expected = GptSpec {
        layers: 2,
        width: 18,
        heads: 3,
        ffn: 44,
        vocab: 41,
        context: 10,
        norm_eps: 1e-5,
        tied: true,
    };
    assert_eq!(spec, ModelSpec::Gpt(expected));
    let Ok(ModelSpec::Gpt(bare)) = parse(&gpt_config()) else { panic!() };
    assert_eq!((bare.ffn, bare.context, bare.tied), (96, 1024, true));
    let mut config = llama_config();
    config["num_key_value_heads"] = Value::Null;
    let spec = llama(&config);
    assert_eq!((spec.kv_heads, spec.head_dim, spec.context), (4, 6, 2048));
    assert_eq!((spec.norm_eps, spec.tied, spec.rope.theta), (1e-6, false, 1e4));
}

#[test]
fn settings_that_change_nothing_are_accepted() {
    let harmless = json!({
        "attention_bias": false, "mlp_bias": null, "sliding_window": null, "attention_dropout": 0.1,
        "hidden_act": "swish", "layer_types": ["full_attention", "full_attention"],
        "pretraining_tp": 1, "rope_scaling": {"rope_type": "default", "attention_factor": null},
        "_name_or_path": "x", "pruned_heads": {}, "partial_rotary_factor": 1.0,
    });
    let mut config = llama_config();
    for (key, value) in harmless.as_object().unwrap() {
        config[key] = value.clone();
    }
    assert_eq!(llama(&config), llama(&llama_config()));
}

/// Sets one key (or removes it, for null), expects a refusal, and returns its message.
fn refusal(mut config: Value, key: &str, value: Value) -> HfError {
    if value.is_null() {
        config.as_object_mut().unwrap().remove(key);
    } else {
        config[key] = value.clone();
    }
    match parse(&config) {
        Err(error) => error,
        Ok(spec) => panic!("{key} = {value} gave {spec:?}"),
    }
}

#[test]
fn variants_that_are_not_implemented_are_refused_by_name() {
    let rope = |kind: &str| json!({"rope_type": kind, "factor": 2.0});
    let llama_rows = [
        ("attention_bias", json!(true), "attention_bias", "true", "false"),
        ("mlp_bias", json!(true), "mlp_bias", "true", "false"),
        ("hidden_act", json!("gelu"), "hidden_act", "\"gelu\"", "silu"),
        ("rope_scaling", rope("yarn"), "rope_scaling.rope_type", "\"yarn\"", "llama3"),
        ("rope_scaling", rope("dynamic"), "rope_scaling.rope_type", "\"dynamic\"", "linear"),
        (
            "rope_parameters",
            rope("longrope"),
            "rope_parameters.rope_type",
            "\"longrope\"",
            "linear",
        ),
        ("rope_scaling", json!({"type": "yarn"}), "rope_scaling.type", "\"yarn\"", "llama3"),
        (
            "rope_parameters",
            json!({"rope_type": "default", "mrope_section": [2, 1]}),
            "rope_parameters.mrope_section",
            "[2,1]",
            "rope_theta",
        ),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_type": "default"}}),
            "rope_parameters.full_attention",
            "default",
            "rope_theta",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "partial_rotary_factor": 0.5}),
            "rope_parameters.partial_rotary_factor",
            "0.5",
            "1",
        ),
        ("partial_rotary_factor", json!(0.25), "partial_rotary_factor", "0.25", "1"),
        ("model_type", json!("mistral"), "model_type", "\"mistral\"", "\"llama\""),
        ("model_type", json!(3), "model_type", "3", "\"gpt2\""),
        (
            "quantization_config",
            json!({"quant_method": "gptq"}),
            "quantization_config",
            "gptq",
            "none",
        ),
        ("sliding_window", json!(4096), "sliding_window", "4096", "none"),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "layer_types",
            "sliding_attention",
            "full_attention",
        ),
        ("auto_map", json!({"AutoModel": "x.Y"}), "auto_map", "x.Y", "not run"),
        ("is_encoder_decoder", json!(true), "is_encoder_decoder", "true", "false"),
    ];
    let gpt_rows = [
        ("activation_function", json!("relu"), "activation_function", "\"relu\"", "gelu_new"),
        ("activation_function", json!("gelu"), "activation_function", "\"gelu\"", "gelu_new"),
        ("scale_attn_weights", json!(false), "scale_attn_weights", "false", "true"),
        (
            "scale_attn_by_inverse_layer_idx",
            json!(true),
            "scale_attn_by_inverse_layer_idx",
            "true",
            "false",
        ),
        ("add_cross_attention", json!(true), "add_cross_attention", "true", "false"),
        ("pruned_heads", json!({"0": [1]}), "pruned_heads", "[1]", "none"),
    ];
    let rows = llama_rows.map(|row| (llama_config(), row)).into_iter();
    for (config, (key, value, named, found, supported)) in
        rows.chain(gpt_rows.map(|row| (gpt_config(), row)))
    {
        let refused = refusal(config, key, value);
        let message = refused.to_string();
        assert!(matches!(refused, HfError::Unsupported { .. }), "{message}");
        let expected = [&format!("`{named}`"), found, supported, "dir/config.json"];
        for part in expected {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }
}

#[test]
fn impossible_values_are_refused() {
    let llama3 = |low: f64, high: Value| json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high});
    let rows = [
        ("hidden_size", json!(25), "multiple of `num_attention_heads` = 4"),
        ("hidden_size", Value::Null, "is missing"),
        ("hidden_size", json!(-24), "found -24"),
        ("hidden_size", json!("24"), "found \"24\""),
        ("hidden_size", json!(24.5), "found 24.5"),
        ("vocab_size", json!(0), "found 0; expected a whole number from 1"),
        ("vocab_size", json!(u64::MAX), "found 18446744073709551615"),
        ("num_hidden_layers", json!(1_000_000), "at most 65536"),
        ("num_key_value_heads", json!(3), "`num_key_value_heads` = 3"),
        ("head_dim", json!(7), "found 7; expected an even number"),
        ("rms_norm_eps", json!(-1.0), "above zero"),
        ("rope_theta", json!(0), "above zero"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
        ("rope_scaling", json!("linear"), "an object"),
        ("rope_scaling", json!({"type": "linear"}), "`rope_scaling.factor` is missing"),
        ("rope_scaling", llama3(4.0, json!(4.0)), "more than `low_freq_factor` = 4"),
        ("rope_scaling", llama3(4.0, Value::Null), "`rope_scaling.high_freq_factor` is missing"),
        ("model_type", Value::Null, "`model_type` is missing"),
    ];
    for (key, value, part) in rows {
        let message = refusal(llama_config(), key, value).to_string();
        assert!(message.contains(part) && message.contains(key), "`{part}` is not in: {message}");
    }
    for text in ["", "[]", "{\"model_type\": \"llama\",", "\u{0}"] {
        let refused = parse_config(text, Path::new("c.json"));
        assert!(matches!(refused, Err(HfError::Corrupt { .. })), "{text}");
    }
}

#[test]
fn what_mixtral_cannot_say_is_neither_read_nor_written() {
    let mut config = llama_config();
    for (key, value) in [
        ("model_type", json!("mixtral")),
        ("num_local_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
    ] {
        config[key] = value;
    }
    let Ok(ModelSpec::Mixtral(spec)) = parse(&config) else { panic!("{config}") };
    assert_eq!((spec.experts, spec.top_k, spec.expert_ffn, spec.every), (4, 2, 36, 1));
    for (key, value, said) in [
        ("num_experts_per_tok", json!(5), "at most `num_local_experts` = 4"),
        ("num_local_experts", json!(null), "a whole number"),
        ("router_jitter_noise", json!(0.1), "router_jitter_noise"),
        ("sliding_window", json!(4096), "sliding_window"),
    ] {
        let mut other = config.clone();
        other[key] = value;
        let text = parse(&other).unwrap_err().to_string();
        assert!(text.contains(key) && text.contains(said), "{text}");
    }
    // A run may have more; its weights say so, and a folder of Mixtral refuses it.
    for other in [
        MixtralSpec { every: 2, ..spec.clone() },
        MixtralSpec { shared: 1, ..spec.clone() },
        MixtralSpec { residual: true, ..spec.clone() },
        MixtralSpec { normalised: false, top_k: 1, ..spec.clone() },
        MixtralSpec { noisy: true, ..spec.clone() },
        MixtralSpec { late: Some(LateExperts { layers: 1, count: 9 }), ..spec.clone() },
    ] {
        let other = ModelSpec::Mixtral(other);
        let path = Path::new("dir/config.json");
        assert_eq!(parse_config(&config_text(&other), path).unwrap(), other);
        let (none, kept) = (BTreeMap::<String, WeightTensor>::new(), KeptKeys::default());
        let refused = save(&scratch("unsaid"), &other, &none, DType::F32, &kept).unwrap_err();
        assert!(matches!(refused, HfError::Unsupported { .. }), "{refused}");
    }
}

/// Both versions of T5, as older and newer files say them, and what is refused.
#[test]
fn t5_is_read_in_both_versions() {
    let first = json!({
        "model_type": "t5", "is_encoder_decoder": true, "vocab_size": 40, "d_model": 24, "num_layers": 2, "num_heads": 4,
        "d_kv": 6, "d_ff": 36, "n_positions": 512,
    });
    let t5 = |config: &Value| match parse(config) {
        Ok(ModelSpec::T5(spec)) => spec,
        other => panic!("{other:?}"),
    };
    assert_eq!(t5(&first), T5Spec::new(2, 24, 4, 36, 40));
    let with = |more: &[(&str, Value)]| {
        let mut config = first.clone();
        more.iter().for_each(|(key, value)| config[*key] = value.clone());
        config
    };
    let gated = [
        ("feed_forward_proj", json!("gated-gelu")),
        ("dense_act_fn", json!("gelu_new")),
        ("is_gated_act", json!(true)),
        ("tie_word_embeddings", json!(false)),
        ("layer_norm_epsilon", json!(1e-5)),
    ];
    let second = T5Spec { gated: true, tied: false, scaled: false, norm_eps: 1e-5, ..t5(&first) };
    assert_eq!(t5(&with(&gated)), second);
    // A head that is tied, and whose input is not scaled, which only newer files can say.
    let third = T5Spec { scaled: false, ..t5(&first) };
    assert_eq!(t5(&with(&[("scale_decoder_outputs", json!(false))])), third);
    for spec in [second, third] {
        let path = Path::new("c.json");
        let spec = ModelSpec::T5(spec);
        assert_eq!(parse_config(&config_text(&spec), path).unwrap(), spec);
    }
    for (key, value, said) in [
        ("num_decoder_layers", json!(3), "expected 2, as many as `num_layers`"),
        ("feed_forward_proj", json!("gated-silu"), "gated-gelu"),
        ("dense_act_fn", json!("gelu_new"), "\"relu\""),
        ("is_gated_act", json!(true), "false, as of \"relu\""),
        ("is_encoder_decoder", json!(false), "true"),
        ("is_decoder", json!(true), "false"),
        ("relative_attention_num_buckets", json!(30), "a multiple of 4"),
        ("relative_attention_max_distance", json!(16), "more than half of"),
        ("d_model", Value::Null, "is missing"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
    ] {
        let refused = refusal(first.clone(), key, value).to_string();
        assert!(refused.contains(key) && refused.contains(said), "`{said}` is not in: {refused}");
    }
}
