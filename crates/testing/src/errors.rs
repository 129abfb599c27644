//! How far results are from what was expected.

use std::collections::BTreeMap;

/// The errors of tensors of one kind (gradients, parameters), each measured as
/// max|a − b| ÷ max(max|b|, root mean square over all expected tensors of that kind).
///
/// The root mean square is a floor for tensors that are zero except for rounding, such as the
/// gradient of the bias of GPT-2's keys.
#[derive(Clone, Debug, Default)]
pub struct Errors {
    found: BTreeMap<String, (Vec<f64>, Vec<f64>)>,
}

impl Errors {
    /// No tensors yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor with what was found and what was expected.
    pub fn add(&mut self, name: &str, found: Vec<f64>, expected: Vec<f64>) {
        assert_eq!(found.len(), expected.len(), "the elements of `{name}`");
        self.found.insert(name.to_owned(), (found, expected));
    }

    /// The tensor with the largest error, and that error.
    pub fn worst(&self) -> (String, f64) {
        let expected = || self.found.values().flat_map(|(_, b)| b);
        let squares: f64 = expected().map(|x| x * x).sum();
        let floor = (squares / expected().count() as f64).sqrt();
        (self.found.iter())
            .map(|(name, (a, b))| (name.clone(), error(a, b, floor)))
            .max_by(|x, y| x.1.total_cmp(&y.1))
            .unwrap()
    }

    /// Fails with the worst tensor's name unless every error is within `tolerance`.
    pub fn assert_within(&self, tolerance: f64, what: &str) {
        let (name, error) = self.worst();
        assert!(error <= tolerance, "{what}: `{name}` is off by {error:e}");
    }
}

/// The error of one tensor alone: max|a − b| ÷ max|b|.
pub fn worst(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    error(found, expected, 0.0)
}

/// Not a number counts as infinitely wrong: a comparison with it would pass every `max`.
fn error(found: &[f64], expected: &[f64], floor: f64) -> f64 {
    let scale = expected.iter().fold(floor, |m, x| m.max(x.abs()));
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0.0, |m: f64, x| match x.is_nan() {
        true => f64::INFINITY,
        false => m.max(x),
    });
    worst / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_that_vanishes_is_measured_by_the_others() {
        let mut errors = Errors::new();
        errors.add("large", vec![2.0, 4.0], vec![2.0, 4.0]);
        errors.add("nothing", vec![1e-9, 0.0], vec![0.0, 0.0]);
        let (name, error) = errors.worst();
        let rms = (20f64 / 4.0).sqrt();
        assert_eq!(name, "nothing");
        assert!((error - 1e-9 / rms).abs() < 1e-20);
    }

    #[test]
    fn not_a_number_is_never_close() {
        assert_eq!(worst(&[f64::NAN, 1.0], &[1.0, 1.0]), f64::INFINITY);
    }
}
