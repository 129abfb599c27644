//! In, out and in again: names, layouts and values survive, in every precision.
//!
//! The exported folders stay in the test's scratch folder, where `tools/oracle/check_export.py` can
//! load them with `transformers`.

use std::collections::BTreeMap;

use half::{bf16, f16};
use phalanx_ir::DType;
use phalanx_models::hf::{HfError, KeptKeys, ModelFolder, WeightTensor, Weights, names, save};
use safetensors::Dtype;

use crate::fixtures::{CASES, case, copy, load, read_raw, scratch, shapes, write_raw};

#[test]
fn parameters_have_the_names_and_shapes_of_the_oracle() {
    for name in CASES {
        let loaded = load(&case(name)).unwrap();
        let oracle = read_raw(&case(name).join("oracle.safetensors"));
        let expected: BTreeMap<String, Vec<usize>> = oracle
            .into_iter()
            .filter_map(|(n, (_, shape, _))| Some((n.strip_prefix("grad.")?.to_owned(), shape)))
            .collect();
        assert_eq!(shapes(&loaded.tensors), expected, "{name}");
        let table = names::params(&loaded.spec);
        let table = table.into_iter().map(|p| (p.name, p.shape)).collect();
        assert_eq!(expected, table, "{name}");
    }
}

#[test]
fn a_model_survives_export_and_import() {
    for name in CASES {
        let first = load(&case(name)).unwrap();
        let dir = scratch(&format!("export-{name}"));
        save(&dir, &first.spec, &first.tensors, DType::F32, &KeptKeys::default()).unwrap();
        assert_eq!(load(&dir).unwrap(), first, "{name}");

        let written = read_raw(&dir.join("model.safetensors"));
        assert_eq!(written.contains_key("lm_head.weight"), !first.spec.tied());
        assert_eq!(files(&dir), ["config.json", "model.safetensors"], "{name}");

        let again = scratch(&format!("export-again-{name}"));
        save(&again, &first.spec, &first.tensors, DType::F32, &KeptKeys::default()).unwrap();
        for file in ["config.json", "model.safetensors"] {
            let bytes = |d: &std::path::Path| std::fs::read(d.join(file)).unwrap();
            assert!(bytes(&dir) == bytes(&again), "{name}: {file} is not reproducible");
        }
    }
}

/// `transformers` wrote these files; ours must hold the same tensors, bit for bit.
#[test]
fn exported_tensors_are_those_that_transformers_wrote() {
    for name in ["gpt2", "llama_tied", "llama_rope_new", "mixtral", "t5", "t5_gated"] {
        let loaded = load(&case(name)).unwrap();
        let dir = scratch(&format!("same-{name}"));
        save(&dir, &loaded.spec, &loaded.tensors, DType::F32, &KeptKeys::default()).unwrap();
        let theirs = read_raw(&case(name).join("model.safetensors"));
        assert!(read_raw(&dir.join("model.safetensors")) == theirs, "{name}");
    }
}

#[test]
fn every_float_type_is_written_and_read() {
    let first = load(&case("gpt2")).unwrap();
    let rounded = |round: fn(f32) -> f32| -> BTreeMap<String, WeightTensor> {
        let one = |t: &WeightTensor| {
            let values = t.to_f32().into_iter().map(round).collect();
            WeightTensor::f32(t.shape.clone(), values)
        };
        first.tensors.iter().map(|(n, t)| (n.clone(), one(t))).collect()
    };
    let widened = first.tensors.iter().map(|(n, t)| {
        let third = t.to_f64().into_iter().map(|x| x / 3.0).collect();
        (n.clone(), WeightTensor::f64(t.shape.clone(), third))
    });
    let f64s: BTreeMap<String, WeightTensor> = widened.collect();
    let singles = first.tensors.clone();
    let cases = [
        (DType::Bf16, singles.clone(), rounded(|x| bf16::from_f32(x).to_f32())),
        (DType::F16, singles.clone(), rounded(|x| f16::from_f32(x).to_f32())),
        (DType::F32, singles.clone(), singles),
        (DType::F64, f64s.clone(), f64s),
    ];
    for (dtype, given, expected) in cases {
        let dir = scratch(&format!("dtype-{dtype}"));
        save(&dir, &first.spec, &given, dtype, &KeptKeys::default()).unwrap();
        assert!(load(&dir).unwrap().tensors == expected, "{dtype}");
    }
    let dir = scratch("dtype-i32");
    let refused =
        save(&dir, &first.spec, &first.tensors, DType::I32, &KeptKeys::default()).unwrap_err();
    assert!(refused.to_string().contains("i32"), "{refused}");
    assert!(files(&dir).is_empty());
}

#[test]
fn single_parameters_can_be_streamed() {
    let source = ModelFolder::open(&case("llama_gqa")).unwrap();
    let all = load(&case("llama_gqa")).unwrap();
    assert_eq!(source.spec(), &all.spec);
    for param in source.params() {
        assert_eq!(source.read(&param.name).unwrap(), all.tensors[&param.name]);
    }
    let refused = source.read("blocks.9.norm1").err().unwrap().to_string();
    assert!(refused.contains("blocks.9.norm1"), "{refused}");
}

#[test]
fn a_tied_head_may_be_stored_again_only_if_it_is_the_embedding() {
    let dir = copy("llama_tied", "tied-head");
    let path = dir.join("model.safetensors");
    let mut tensors = read_raw(&path);
    let head = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), head);
    write_raw(&path, &tensors);
    assert_eq!(load(&dir).unwrap(), load(&case("llama_tied")).unwrap());

    tensors.get_mut("lm_head.weight").unwrap().2[3] ^= 1;
    write_raw(&path, &tensors);
    let refused = load(&dir).unwrap_err().to_string();
    for part in ["lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"] {
        assert!(refused.contains(part), "{refused}");
    }
}

/// Encoder, decoder and a tied head read one table, which a file may hold once for each.
#[test]
fn a_shared_table_may_be_stored_again_only_if_it_is_the_same() {
    let dir = copy("t5", "shared-table");
    let path = dir.join("model.safetensors");
    let mut tensors = read_raw(&path);
    let table = tensors["shared.weight"].clone();
    let copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"];
    tensors.extend(copies.map(|name| (name.to_owned(), table.clone())));
    // The first versions stored a table of distances that nothing reads.
    let unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";
    tensors.insert(unread.to_owned(), (Dtype::F32, vec![8, 2], vec![0; 64]));
    write_raw(&path, &tensors);
    assert_eq!(load(&dir).unwrap(), load(&case("t5")).unwrap());

    for copy in copies {
        tensors.get_mut(copy).unwrap().2[3] ^= 1;
        write_raw(&path, &tensors);
        let refused = load(&dir).unwrap_err().to_string();
        assert!(refused.contains(copy) && refused.contains("shared.weight"), "{refused}");
        tensors.insert(copy.to_owned(), table.clone());
    }
}

#[test]
fn buffers_of_older_versions_are_passed_over() {
    let dir = copy("llama_rope_new", "buffers");
    let path = dir.join("model.safetensors");
    let mut tensors = read_raw(&path);
    let table = (Dtype::F32, vec![4], vec![0; 16]);
    let name = "model.layers.1.self_attn.rotary_emb.inv_freq";
    tensors.insert(name.to_owned(), table);
    write_raw(&path, &tensors);
    assert_eq!(load(&dir).unwrap(), load(&case("llama_rope_new")).unwrap());
}

#[test]
fn tensors_that_are_not_the_model_are_not_written() {
    let model = load(&case("gpt2")).unwrap();
    let dir = scratch("refused-save").join("new");
    type Change = fn(&mut BTreeMap<String, WeightTensor>);
    let rows: [(Change, &[&str]); 4] = [
        (
            |t| drop(t.remove("blocks.1.mlp.up_bias")),
            &["blocks.1.mlp.up_bias", "is missing", "[96]"],
        ),
        (
            |t| drop(t.insert("pos".to_owned(), WeightTensor::f32([2, 2], vec![0.0; 4]))),
            &["pos", "[2, 2]", "[16, 24]"],
        ),
        (
            |t| drop(t.insert("norm.bias".to_owned(), WeightTensor::f32([24], vec![0.0; 23]))),
            &["norm.bias", "[23]", "[24]"],
        ),
        (
            |t| drop(t.insert("head".to_owned(), WeightTensor::f32([1], vec![0.0]))),
            &["head", "no such parameter"],
        ),
    ];
    for (change, parts) in rows {
        let mut tensors = model.tensors.clone();
        change(&mut tensors);
        let refused =
            save(&dir, &model.spec, &tensors, DType::F32, &KeptKeys::default()).unwrap_err();
        assert!(matches!(refused, HfError::Tensor { .. }));
        for part in parts {
            assert!(refused.to_string().contains(part), "{refused}");
        }
        assert!(!dir.exists(), "something was written");
    }
}

/// The second file cannot be written, so the first stays as it was.
#[test]
fn a_failed_export_leaves_no_mixture() {
    let dir = scratch("no-mixture");
    let model = load(&case("gpt2")).unwrap();
    std::fs::write(dir.join("model.safetensors"), "old").unwrap();
    std::fs::create_dir(dir.join("config.json")).unwrap();
    save(&dir, &model.spec, &model.tensors, DType::F32, &KeptKeys::default()).unwrap_err();
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2, "nothing is left behind");
}

fn files(dir: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
