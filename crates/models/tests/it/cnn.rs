//! The convolutional network against PyTorch in f64 (`tools/oracle/cnn.py`): logits, gradients, and twenty
//! steps of Adam.

use phalanx_cpu::CpuEngine;
use phalanx_ir::{DType, Param};
use phalanx_models::{Architecture, BatchShape, Cnn, port};
use phalanx_reference::RefTensor;
use phalanx_script::Optimizer;
use phalanx_testing::{Rig, RigBatch, Setup, optimise, worst};
use serde_json::Value;

use crate::fixtures::root;

const BATCH: usize = 4;

#[test]
fn the_network_is_pytorchs() {
    let text = std::fs::read_to_string(root().join("cnn.json")).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    let (cnn, shape) = (Cnn::mnist(), BatchShape { batch: BATCH, seq: 1 });
    let model = cnn.model(shape, DType::F64).unwrap();
    let logits = cnn.logits(shape, DType::F64).unwrap();
    let setup = Setup {
        optimizer: Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 },
        clip: None,
        compile: optimise,
        ..Setup::new(DType::F64)
    };
    let mut rig = Rig::with_forward(CpuEngine::new(2).unwrap(), &model, &logits, &setup);
    let phase = |name: &str| model.params().iter().position(|own| own.name == name).unwrap();
    rig.set_params(|param: &Param| {
        let scale = match param.name.split('.').next().unwrap() {
            "conv1" => 2,
            "conv2" => 4,
            "fc1" => 7,
            _ => 3,
        };
        numbers(param.elements(), phase(&param.name), scale)
    });
    let batches: Vec<RigBatch> = (0..2).map(batch).collect();
    let found = rig.probe(&batches[0], "fc2", port::PREDICTION);
    near("the logits", &found, &list(&record["logits"]));
    let steps = list(&record["losses"]).into_iter().zip(list(&record["grad_norms"]));
    for (step, (loss, norm)) in steps.enumerate() {
        let index = step % 2;
        let found = rig.step(&batches[index..=index], 1e-3, 1.0 / BATCH as f64);
        near(&format!("loss and norm of step {step}"), &[found.0, found.1], &[loss, norm]);
        if step == 0 {
            for param in model.params() {
                gradient(&param.name, &rig.gradient(&param.name), &record["gradients"]);
            }
        }
    }
    for param in model.params() {
        let expected = record["final_norms"][&param.name].as_f64().unwrap();
        near(&param.name, &[norm(&rig.param(&param.name))], &[expected]);
    }
}

fn gradient(name: &str, found: &[f64], record: &Value) {
    let record = &record[name];
    near(&format!("the norm of d{name}"), &[norm(found)], &[record["norm"].as_f64().unwrap()]);
    let picked: Vec<f64> = list(&record["at"]).iter().map(|&at| found[at as usize]).collect();
    near(&format!("d{name}"), &picked, &list(&record["values"]));
}

/// Images and labels as the script makes them.
fn batch(index: usize) -> RigBatch {
    let images = numbers(BATCH * 28 * 28, 20 + index, 0);
    let labels: Vec<i32> = (0..BATCH).map(|i| ((3 * i + 5 * index + 1) % 10) as i32).collect();
    let images = RefTensor::new(DType::F32, &[BATCH, 28, 28, 1], &images).unwrap();
    let labels = RefTensor::from_i32(&[BATCH], &labels).unwrap();
    RigBatch { data: vec![(port::X.to_owned(), images), (port::Y.to_owned(), labels)], first: 0 }
}

fn numbers(count: usize, phase: usize, scale: i32) -> Vec<f64> {
    let whole = |i: usize| (7919 * i + 104_729 * phase) % 2003;
    (0..count).map(|i| (whole(i) as f64 - 1001.0) / 1024.0 / 2f64.powi(scale)).collect()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn list(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn near(what: &str, found: &[f64], expected: &[f64]) {
    let error = worst(found, expected);
    assert!(error <= 1e-9, "{what}: off by {error:e}\n{found:?}\n{expected:?}");
}
