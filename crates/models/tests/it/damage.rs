//! Damaged, truncated and mismatched files: always an error that names the file and the tensor.

use std::path::Path;

use phalanx_models::hf::HfError;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::fixtures::{Raw, copy, load, read_raw, scratch, write_raw};

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SECOND: &str = "model-00002-of-00002.safetensors";

fn refused(dir: &Path, parts: &[&str]) -> HfError {
    let error = match load(dir) {
        Err(error) => error,
        Ok(_) => panic!("{} was loaded", dir.display()),
    };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(error.is_bad_input());
    error
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let dir = copy("llama_rope_new", "cut");
    let path = dir.join(FILE);
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let lengths = (0..header).step_by(97).chain((header..whole.len()).step_by(1001));
    for length in lengths.chain([header - 1, whole.len() - 1]) {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = refused(&dir, &[FILE, &format!("{length} bytes")]);
        assert!(matches!(error, HfError::Corrupt { .. }));
    }
    let longer = [whole.as_slice(), b"x"].concat();
    std::fs::write(&path, &longer).unwrap();
    refused(&dir, &[FILE, &longer.len().to_string(), &whole.len().to_string()]);
}

#[test]
fn damaged_headers_are_refused() {
    let dir = copy("llama_rope_new", "headers");
    let path = dir.join(FILE);
    let whole = std::fs::read(&path).unwrap();
    let with_header = |header: &str| {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &[0; 64]].concat()
    };
    let overlapping = r#"{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},
                          "b":{"dtype":"F32","shape":[8],"data_offsets":[16,64]}}"#;
    let endless = endless_header();
    let rows = [
        ([&u64::MAX.to_le_bytes()[..], &whole[8..]].concat(), "18446744073709551615 bytes"),
        (with_header("not json"), "expected ident at line 1"),
        (with_header(r#"{"a":3}"#), "expected a safetensors header"),
        (with_header(r#"{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,64]}}"#), "F3"),
        (with_header(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,64]}}"#), "header"),
        (
            with_header(&format!(
                r#"{{"a":{{"dtype":"F32","shape":[4,{}],"data_offsets":[0,64]}}}}"#,
                u64::MAX / 2
            )),
            "header",
        ),
        (with_header(overlapping), "header"),
        (with_header(&endless), "as its header says"),
    ];
    for (bytes, part) in rows {
        std::fs::write(&path, bytes).unwrap();
        let error = refused(&dir, &[FILE, part]);
        assert!(matches!(error, HfError::Corrupt { .. }), "{error}");
    }
}

/// A header that is consistent in itself and claims nearly 2^64 bytes.
fn endless_header() -> String {
    let size = 1u64 << 60;
    let entries: Vec<String> = (0..16)
        .map(|i| {
            let count = if i == 15 { size - 1 } else { size };
            let (start, end) = (i * size, i * size + count);
            format!(r#""{i}":{{"dtype":"U8","shape":[{count}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    format!("{{{}}}", entries.join(","))
}

/// Bytes all along the header are damaged in turn. Most changes must be noticed; a few are harmless
/// (a letter of the metadata, white space), and those must load the same tensors or be refused.
#[test]
fn no_damaged_header_byte_is_a_panic() {
    let dir = copy("llama_rope_new", "bytes");
    let path = dir.join(FILE);
    let whole = std::fs::read(&path).unwrap();
    let good = load(&dir).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (0..header).step_by(3) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x11;
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(loaded) = load(&dir) {
            assert!(loaded == good, "byte {at} changed the model unnoticed");
        }
    }
}

#[test]
fn tensors_that_do_not_fit_the_configuration_are_refused() {
    let dir = copy("llama_rope_new", "mismatch");
    let path = dir.join(FILE);
    let good = read_raw(&path);
    const Q: &str = "model.layers.1.self_attn.q_proj.weight";
    type Change = fn(&mut Raw);
    let rows: [(Change, &[&str]); 6] = [
        (|t| drop(t.remove(Q)), &[Q, "is missing", "[16, 16]"]),
        (
            |t| t.retain(|name, _| !name.contains("norm")),
            &["model.layers.0.input_layernorm.weight", "is missing, and 4 more are"],
        ),
        (
            |t| t.get_mut(Q).unwrap().1 = vec![8, 32],
            &[Q, "found shape [8, 32]", "expected shape [16, 16]"],
        ),
        (
            |t| t.get_mut(Q).unwrap().1 = vec![256],
            &[Q, "found shape [256]", "expected shape [16, 16]"],
        ),
        (
            |t| {
                let bias = "model.layers.1.self_attn.q_proj.bias".to_owned();
                t.insert(bias, (Dtype::F32, vec![16], vec![0; 64]));
            },
            &["model.layers.1.self_attn.q_proj.bias", "found shape [16]", "no such tensor"],
        ),
        (|t| t.get_mut(Q).unwrap().0 = Dtype::I32, &[Q, "I32", "F32, F64, BF16 or F16"]),
    ];
    for (change, parts) in rows {
        let mut tensors = good.clone();
        change(&mut tensors);
        write_raw(&path, &tensors);
        let error = refused(&dir, parts);
        assert!(matches!(error, HfError::Tensor { .. } | HfError::Elements { .. }));
        assert!(error.to_string().contains(FILE));
    }
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    const NORM: &str = "model.norm.weight";
    let dir = copy("llama_gqa", "index");
    let index = dir.join(INDEX);
    let good: Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    assert!(load(&dir).is_ok());
    let placed = |name: &str, shard: Value| {
        let mut changed = good.clone();
        changed["weight_map"][name] = shard;
        changed.to_string()
    };
    let mut unlisted = good.clone();
    unlisted["weight_map"].as_object_mut().unwrap().remove(NORM);
    let rows: [(String, &[&str]); 9] = [
        (
            placed(NORM, json!("other.safetensors")),
            &[INDEX, NORM, "other.safetensors", "not exist"],
        ),
        (placed("model.x", json!(SECOND)), &[SECOND, "model.x", "is missing", INDEX]),
        (unlisted.to_string(), &[SECOND, NORM, INDEX]),
        (placed(NORM, json!("../index/x")), &[INDEX, NORM, "../index/x", "name of a file"]),
        (placed(NORM, json!("..")), &[INDEX, NORM, "name of a file"]),
        (placed(NORM, json!(7)), &[INDEX, NORM, "found 7"]),
        (json!({"metadata": {}}).to_string(), &[INDEX, "weight_map"]),
        (json!({"weight_map": {}}).to_string(), &[INDEX, "no tensors"]),
        ("{\"weight_map\": {".to_owned(), &[INDEX, "line 1"]),
    ];
    for (text, parts) in rows {
        std::fs::write(&index, text).unwrap();
        refused(&dir, parts);
    }
    std::fs::write(&index, good.to_string()).unwrap();
    std::fs::remove_file(dir.join(SECOND)).unwrap();
    refused(&dir, &[INDEX, SECOND, "does not exist"]);
}

#[test]
fn folders_without_a_model_are_refused() {
    let dir = scratch("empty");
    refused(&dir, &["config.json", "no such file"]);
    refused(&dir.join("nowhere"), &["nowhere", "config.json"]);
    let dir = copy("gpt2", "no-weights");
    std::fs::rename(dir.join(FILE), dir.join("pytorch_model.bin")).unwrap();
    let error = refused(&dir, &["no-weights", "pytorch_model.bin", "save_pretrained"]);
    assert!(matches!(error, HfError::NoWeights { .. }));
    std::fs::create_dir(dir.join(FILE)).unwrap();
    refused(&dir, &[FILE]);
    std::fs::write(dir.join("config.json"), [0xff, 0xfe]).unwrap();
    refused(&dir, &["config.json"]);
}
