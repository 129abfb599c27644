//! Reductions over one row, in the fixed order of [`super::lanes`].

use super::elementwise::larger;
use super::inlined::inlined;
use super::lanes::{LANES, combine_lanes, lane_fold, lane_sum};
use crate::element::{CpuElement, CpuFloat};

/// The largest element; negative infinity for an empty row, NaN if any element is.
#[inline(always)]
pub(crate) fn maximum<T: CpuElement>(row: &[T]) -> T::Acc {
    let max = inlined!(|a, b| larger(a, b));
    lane_fold([row], T::Acc::NEG_INFINITY, inlined!(|[x]| x), max)
}

/// Replaces every `x` by `exp(x·scale − shift)` and returns their sum.
#[inline(always)]
pub(crate) fn exp_in_place<F: CpuFloat>(row: &mut [F], scale: F, shift: F) -> F {
    let mut sums = [F::ZERO; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (x, sum) in chunk.iter_mut().zip(&mut sums) {
            *x = x.mul_add(scale, -shift).exp();
            *sum += *x;
        }
    }
    for (x, sum) in chunks.into_remainder().iter_mut().zip(&mut sums) {
        *x = x.mul_add(scale, -shift).exp();
        *sum += *x;
    }
    combine_lanes(sums, inlined!(|a, b| a + b))
}

/// A number `m` and the sum of `exp(x − m)`, whose logarithm plus `m` is the row's log-sum-exp.
///
/// `m` is the largest element, so that nothing overflows, or the least finite number if there is
/// nothing but negative infinity.
#[inline(always)]
pub(crate) fn maximum_and_sum_of_exp<T: CpuElement>(row: &[T]) -> (T::Acc, T::Acc) {
    // Not negative infinity: a piece that holds nothing else would make the difference NaN.
    let mut max = -T::Acc::MAX;
    let mut sum = T::Acc::ZERO;
    for piece in row.chunks(PIECE) {
        let new = larger(maximum(piece), max);
        let terms = lane_sum([piece], inlined!(|[x]| (x - new).exp()));
        sum = sum * (max - new).exp() + terms;
        max = new;
    }
    (max, sum)
}

/// The inner product of two rows of the same length.
#[inline(always)]
pub(crate) fn dot<T: CpuElement>(a: &[T], b: &[T]) -> T::Acc {
    lane_sum([a, b], inlined!(|[a, b]| a * b))
}

/// Elements that are taken from memory at once: their maximum and the sum of their exponentials
/// are two passes, the second of which finds them in the first cache.
pub(crate) const PIECE: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn against_plain_sums_at_every_length() {
        for len in 0..100 {
            let row: Vec<f64> = (0..len).map(|i| ((i * 37 % 19) as f64 - 9.0) * 0.3).collect();
            let other: Vec<f64> = row.iter().map(|x| 1.0 - x).collect();
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(maximum(&row), largest);
            let close = |got: f64, want: f64| {
                assert!((got - want).abs() <= 1e-12 * (1.0 + want.abs()), "{got} {want}");
            };
            close(dot(&row, &other), row.iter().zip(&other).map(|(x, y)| x * y).sum());
            let mut powers = row.clone();
            let sum = exp_in_place(&mut powers, 2.0, 0.5);
            close(sum, row.iter().map(|x| (x * 2.0 - 0.5).exp()).sum());
            for (power, x) in powers.iter().zip(&row) {
                close(*power, (x * 2.0 - 0.5).exp());
            }
        }
    }

    #[test]
    fn log_sum_exp_in_pieces() {
        let plain = |row: &[f64]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
        for len in [1, 33, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7] {
            let mut row: Vec<f64> = (0..len).map(|i| (i * 37 % 1019) as f64 * 0.02).collect();
            let check = |row: &[f64]| {
                let (max, sum) = maximum_and_sum_of_exp(row);
                let (got, want) = (max + sum.ln(), plain(row));
                assert!((got - want).abs() <= 1e-12 * want, "{got} {want}");
            };
            check(&row);
            // A first piece of nothing but negative infinity counts for nothing.
            if len > PIECE {
                row[..PIECE].fill(f64::NEG_INFINITY);
                check(&row);
            }
        }
        let (max, sum) = maximum_and_sum_of_exp::<f64>(&[f64::NEG_INFINITY; 5]);
        assert_eq!(max + sum.ln(), f64::NEG_INFINITY);
    }

    #[test]
    fn a_nan_is_not_passed_over() {
        for at in [0, 5, 31, 40, 127, 130, 199] {
            let mut row = vec![1f32; 200];
            row[at] = f32::NAN;
            assert!(maximum(&row).is_nan());
            let (max, sum) = maximum_and_sum_of_exp(&row);
            assert!((max + sum.ln()).is_nan());
        }
    }
}
