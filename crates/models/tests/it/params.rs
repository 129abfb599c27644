//! The weight file of a run.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_models::hf::{HfError, Params, TensorInfo, WeightTensor, stream_params};

use crate::fixtures::{all, case, load, read_raw, scratch};

pub(crate) fn save_params(
    path: &Path,
    tensors: &BTreeMap<String, WeightTensor>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), HfError> {
    let layout = |(name, tensor): (&String, &WeightTensor)| TensorInfo {
        name: name.clone(),
        shape: tensor.shape.clone(),
        dtype: tensor.dtype(),
    };
    let layouts: Vec<TensorInfo> = tensors.iter().map(layout).collect();
    stream_params(path, &layouts, metadata, |at| tensors.get(&layouts[at].name).cloned())
}

fn example() -> BTreeMap<String, WeightTensor> {
    BTreeMap::from([
        (
            "a.weight".to_owned(),
            WeightTensor::f32([2, 3], vec![0.1, -0.0, f32::MAX, 1e-40, 2.0, 3.5]),
        ),
        ("b".to_owned(), WeightTensor::f64([2], vec![0.1, f64::MIN_POSITIVE])),
        ("empty".to_owned(), WeightTensor::f32([0, 4], vec![])),
        ("scalar".to_owned(), WeightTensor::f32([], vec![7.0])),
    ])
}

#[test]
fn parameters_and_metadata_come_back_exactly() {
    let path = scratch("params").join("model.safetensors");
    let metadata = BTreeMap::from([
        ("model".to_owned(), "{\"layers\": 2}".to_owned()),
        ("step".to_owned(), "20".to_owned()),
    ]);
    save_params(&path, &example(), &metadata).unwrap();
    let first = std::fs::read(&path).unwrap();
    save_params(&path, &example(), &metadata).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), first, "the same content, the same bytes");

    let back = Params::open(&path).unwrap();
    assert_eq!(all(&back).unwrap(), example());
    assert_eq!(back.metadata(), &metadata);
    let raw = read_raw(&path);
    assert_eq!(raw["b"].2, [0.1f64.to_le_bytes(), f64::MIN_POSITIVE.to_le_bytes()].concat());
    let header = 8 + u64::from_le_bytes(first[..8].try_into().unwrap());
    assert_eq!(header % 8, 0);
}

#[test]
fn other_files_are_told_apart() {
    let refused = Params::open(&case("gpt2").join("model.safetensors")).err().unwrap();
    let message = refused.to_string();
    assert!(message.contains("\"pt\"") && message.contains("\"phalanx\""), "{message}");
    let refused = Params::open(&case("gpt2").join("oracle.safetensors")).err().unwrap();
    assert!(refused.to_string().contains("is missing"));
    let refused = Params::open(&case("gpt2").join("config.json")).err().unwrap();
    assert!(matches!(refused, HfError::Corrupt { .. }));
}

#[test]
fn a_failed_write_leaves_the_previous_file() {
    let dir = scratch("failed-write");
    let path = dir.join("model.safetensors");
    let good = load(&case("gpt2")).unwrap().tensors;
    save_params(&path, &good, &BTreeMap::new()).unwrap();
    let mut bad = good.clone();
    bad.insert("embed".to_owned(), WeightTensor::f32([9], vec![0.0; 8]));
    let refused = save_params(&path, &bad, &BTreeMap::new()).unwrap_err();
    assert!(refused.to_string().contains("[9] with 8 values"), "{refused}");
    assert_eq!(all(&Params::open(&path).unwrap()).unwrap(), good);

    let nowhere = dir.join("nowhere").join("model.safetensors");
    let refused = save_params(&nowhere, &good, &BTreeMap::new()).unwrap_err();
    assert!(matches!(refused, HfError::Write(_)) && !refused.is_bad_input());
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "nothing is left behind");
}
