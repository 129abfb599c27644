//! Uniform random numbers, bit by bit from the masks of dropout.
//!
//! A mask is a pure function of the seed, the step, the layer and an element's global place, so these
//! numbers are the same in every layout, and are never stored.

use phalanx_ir::{Builder, DType, Tensor};

/// Numbers of so many random bits between 0 and 1, with the mean ½.
///
/// Each bit is an elementwise op, so a number costs `bits` of them.
pub(crate) fn uniform<'b, const N: usize>(
    b: &'b Builder,
    dtype: DType,
    shape: [usize; N],
    bits: i32,
) -> Tensor<'b> {
    // What dropout keeps of a half it doubles.
    let bit = |i: i32| b.constant(dtype, shape, 0.5f64.powi(i + 1)).dropout(0.5);
    let sum = (2..=bits).fold(bit(1), |sum, i| sum + bit(i));
    sum.shift(0.5f64.powi(bits + 1))
}

#[cfg(test)]
mod tests {
    use phalanx_reference::{RefTensor, run};

    use super::*;

    #[test]
    fn numbers_are_uniform_and_differ_by_step() {
        let b = Builder::new("uniform", DType::F64);
        b.probe("u", uniform(&b, DType::F64, [4, 1000], 16));
        let program = b.finish().unwrap();
        let drawn = |step: i32| -> Vec<f64> {
            let key = RefTensor::from_i32(&[5], &[1, 2, step, 4, 5]).unwrap();
            run(&program, &[("key", key)]).unwrap()[0].1.values()
        };
        let numbers = drawn(1);
        assert!(numbers.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = |f: &dyn Fn(f64) -> f64| numbers.iter().map(|&u| f(u)).sum::<f64>() / 4000.0;
        // Of 4000 numbers, means are within a hundredth of ½ and of ⅓.
        assert!((mean(&|u| u) - 0.5).abs() < 0.01, "{}", mean(&|u| u));
        assert!((mean(&|u| u * u) - 1.0 / 3.0).abs() < 0.01, "{}", mean(&|u| u * u));
        assert!(drawn(2) != numbers && drawn(1) == numbers);
    }
}
