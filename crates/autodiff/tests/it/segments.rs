//! Gradients of whole segments, as scripts get them from FBW, against central differences.

use std::collections::BTreeMap;

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Program, Role};
use phalanx_reference::{Tensor, run};

use crate::support::{chain, numbers, segments};

/// Coordinates tried of each input.
const SAMPLES: u64 = 12;

#[test]
fn gradients_of_segments_are_slopes() {
    for (name, forward) in segments(DType::F64) {
        let phases = slice(&joint(&forward, DType::F64).unwrap(), Recompute::None);
        let numbers = numbers(&forward);
        let results = chain(&[&phases.fbw], &numbers);
        for port in forward.inputs() {
            let key = match port.role {
                Role::Param => (Role::Gradient, port.name.clone()),
                Role::Boundary => (Role::Cotangent, format!("d.{}", port.name)),
                _ => continue,
            };
            let gradient = results[&key].values();
            for i in coordinates(&port.name, gradient.len()) {
                let (found, expected) = (gradient[i], slope(&forward, &numbers, &port.name, i));
                assert!(
                    (found - expected).abs() <= 1e-7 * (1.0 + expected.abs()),
                    "{name}: d{}[{i}] is {found}, central differences give {expected}",
                    port.name
                );
            }
        }
    }
}

fn coordinates(name: &str, elements: usize) -> Vec<usize> {
    let stream = Stream::named(37, name);
    let draw = |i| stream.below(i, elements as u64) as usize;
    match elements as u64 <= SAMPLES {
        true => (0..elements).collect(),
        false => (0..SAMPLES).map(draw).collect(),
    }
}

fn slope(forward: &Program, numbers: &BTreeMap<String, Tensor>, name: &str, i: usize) -> f64 {
    const STEP: f64 = 1e-5;
    let moved = |by: f64| {
        let mut numbers = numbers.clone();
        let old = &numbers[name];
        let mut values = old.values();
        values[i] += by;
        let new = Tensor::from_f64(old.shape(), &values).unwrap();
        numbers.insert(name.to_owned(), new);
        objective(forward, &numbers)
    };
    (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
}

/// The losses, and each boundary output times its cotangent: what the gradients are gradients of.
fn objective(forward: &Program, numbers: &BTreeMap<String, Tensor>) -> f64 {
    let inputs: Vec<(&str, Tensor)> = (forward.inputs().iter())
        .map(|p| (p.name.as_str(), numbers[&p.name].clone()))
        .collect();
    let outputs = run(forward, &inputs).unwrap();
    let terms = forward.outputs().iter().zip(&outputs);
    terms
        .map(|(port, (name, value))| match port.role {
            Role::Loss => value.values()[0],
            _ => {
                let weights = numbers[&format!("d.{name}")].values();
                let products = value.values().into_iter().zip(weights);
                products.map(|(a, b)| a * b).sum()
            }
        })
        .sum()
}
