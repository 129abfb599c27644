//! Central differences of a segment's forward.

use std::collections::BTreeMap;

use phalanx_ir::{Program, Role};
use phalanx_reference::{RefTensor, run};

/// The slope of a segment's objective with respect to element `i` of the input `name`.
pub(crate) fn slope(
    forward: &Program,
    numbers: &BTreeMap<String, RefTensor>,
    name: &str,
    i: usize,
) -> f64 {
    const STEP: f64 = 1e-5;
    let moved = |by: f64| {
        let mut numbers = numbers.clone();
        let old = &numbers[name];
        let mut values = old.values();
        values[i] += by;
        let new = RefTensor::from_f64(old.shape(), &values).unwrap();
        numbers.insert(name.to_owned(), new);
        objective(forward, &numbers)
    };
    (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
}

/// The losses, and each boundary output times its cotangent: what the gradients are gradients of.
fn objective(forward: &Program, numbers: &BTreeMap<String, RefTensor>) -> f64 {
    let inputs: Vec<(&str, RefTensor)> =
        (forward.inputs().iter()).map(|p| (p.name.as_str(), numbers[&p.name].clone())).collect();
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
