//! Convolution, pooling and norms of images, with their gradients, against PyTorch in f64
//! (`tools/oracle/windows.py`).

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::ops::Window;
use phalanx_ir::{Builder, DType, Tensor};
use phalanx_reference::{RefTensor, run};
use serde_json::Value;

use crate::fixtures::root;

#[test]
fn windows_and_norms_are_pytorchs() {
    let text = std::fs::read_to_string(root().join("windows.json")).unwrap();
    let table: Value = serde_json::from_str(&text).unwrap();
    let cases = table["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        check(case);
    }
}

fn check(case: &Value) {
    let b = Builder::new("case", DType::F64);
    let shapes: Vec<Vec<usize>> = case["inputs"].as_array().unwrap().iter().map(sizes).collect();
    let names = ["a", "b", "c"];
    let inputs: Vec<Tensor<'_>> = names
        .iter()
        .zip(&shapes)
        .map(|(name, shape)| {
            b.input(
                name,
                phalanx_ir::Role::Param,
                phalanx_ir::TensorType::new(DType::F64, shape.clone()),
            )
        })
        .collect();
    let y = apply(case, &inputs);
    assert_eq!(y.shape(), sizes(&case["shape"]));
    let weights = b.input("weights", phalanx_ir::Role::Data, y.ty());
    b.probe("y", y);
    b.loss("loss", (y * weights).sum_all());
    let program = b.finish().unwrap();
    let program = slice(&joint(&program, DType::F64).unwrap(), Recompute::None).fbw;
    let mut given: Vec<(&str, RefTensor)> = names
        .into_iter()
        .zip(&shapes)
        .enumerate()
        .map(|(i, (name, shape))| (name, numbers(shape, (i + 1) as f64)))
        .collect();
    given.push(("weights", numbers(&sizes(&case["shape"]), 9.0)));
    let found = run(&program, &given).unwrap();
    let find = |name: &str| &found.iter().find(|(own, _)| own == name).unwrap().1;
    near(case, find("y"), &case["result"]);
    for (name, expected) in names.iter().zip(case["gradients"].as_array().unwrap()) {
        near(case, find(name), expected);
    }
}

fn apply<'b>(case: &Value, v: &[Tensor<'b>]) -> Tensor<'b> {
    let pair = |key: &str| -> [usize; 2] { sizes(&case[key]).try_into().unwrap() };
    let window = || {
        let own = Window::of(pair("size")).stride(pair("stride"));
        own.dilation(pair("dilation")).pad(pair("pad"))
    };
    match case["name"].as_str().unwrap() {
        "conv2d" => v[0].conv2d(v[1], window()),
        "max_pool" => v[0].max_pool(window()),
        "mean_pool" => v[0].mean_pool(window()),
        "layer_norm" => v[0].layer_norm(v[1], v[2], 1e-3),
        "group_norm" => {
            v[0].group_norm(case["groups"].as_u64().unwrap() as usize, v[1], v[2], 1e-3)
        }
        other => panic!("unknown case {other}"),
    }
}

fn sizes(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

/// The numbers that the script gives an input.
fn numbers(shape: &[usize], phase: f64) -> RefTensor {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| (1.3 * i as f64 + phase).sin()).collect();
    RefTensor::from_f64(shape, &values).unwrap()
}

fn near(case: &Value, found: &RefTensor, expected: &Value) {
    let expected = expected.as_array().unwrap();
    assert_eq!(found.values().len(), expected.len());
    for (found, expected) in found.values().iter().zip(expected) {
        let expected = expected.as_f64().unwrap();
        assert!((found - expected).abs() < 1e-12, "{}: {found}, not {expected}", case["name"]);
    }
}
