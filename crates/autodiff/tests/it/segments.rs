//! Gradients of whole segments, as scripts get them from FBW, against central differences.

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Role};

use crate::slope::slope;
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
