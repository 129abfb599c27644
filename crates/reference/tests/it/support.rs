//! What the tests share: fillings, and programs of one expression.

use phalanx_ir::{Builder, DType, Role, Tensor as Value, TensorType};
use phalanx_reference::{RefTensor, run};
use phalanx_testing::tensor;

/// sin(0.37·i), a deterministic filling that other programs reproduce easily.
pub(crate) fn wave(shape: &[usize], scale: f64, shift: f64) -> RefTensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| (i as f64 * 0.37).sin() * scale + shift).collect();
    tensor(shape, &values)
}

/// Runs one expression over inputs that are all given, and returns its results.
pub(crate) fn eval(
    inputs: &[(&str, RefTensor)],
    expression: impl for<'b> FnOnce(&'b Builder, &[Value<'b>]) -> Vec<Value<'b>>,
) -> Vec<RefTensor> {
    // Random ops look their key up by name.
    let role = |name: &str| if name == "key" { Role::Random } else { Role::Data };
    let b = Builder::new("expression", DType::F64);
    let handles: Vec<Value<'_>> = (inputs.iter())
        .map(|(name, t)| b.input(name, role(name), TensorType::new(t.dtype(), t.shape())))
        .collect();
    for (i, value) in expression(&b, &handles).into_iter().enumerate() {
        b.probe(&format!("y{i}"), value);
    }
    let outputs = run(&b.finish().unwrap(), inputs).unwrap();
    outputs.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Fails unless all numbers are within `tolerance` of the expected ones.
pub(crate) fn assert_close(got: &RefTensor, expected: &[f64], tolerance: f64) {
    let got = got.values();
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(
            error <= tolerance * (1.0 + expected.abs()),
            "element {i} is {got}, expected {expected}"
        );
    }
}
