//! Reductions over one row, written so that the compiler may use all lanes of a vector.
//!
//! Sums of floats may not be reordered by the compiler, so the order is fixed here: `LANES` partial
//! results, each over every `LANES`-th element, combined at the end. It is the same order for every
//! instruction set and every split over threads.

use crate::element::{Element, Float};

const LANES: usize = 32;

/// The largest element; negative infinity for an empty row. NaN is passed over.
#[inline(always)]
pub(crate) fn maximum<T: Element>(row: &[T]) -> T::Acc {
    let lanes = reduce(
        row,
        T::Acc::NEG_INFINITY,
        #[inline(always)]
        |best, x| x.load().maximum(best),
    );
    combine(
        lanes,
        #[inline(always)]
        |a, b| b.maximum(a),
    )
}

/// Replaces every `x` by `exp(x·scale − shift)` and returns their sum.
#[inline(always)]
pub(crate) fn exp_in_place<F: Float>(row: &mut [F], scale: F, shift: F) -> F {
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
    combine(
        sums,
        #[inline(always)]
        |a, b| a + b,
    )
}

/// The sum of `exp(x − shift)`.
#[inline(always)]
pub(crate) fn sum_of_exp<T: Element>(row: &[T], shift: T::Acc) -> T::Acc {
    let lanes = reduce(
        row,
        T::Acc::ZERO,
        #[inline(always)]
        |sum, x| sum + (x.load() - shift).exp(),
    );
    combine(
        lanes,
        #[inline(always)]
        |a, b| a + b,
    )
}

/// The inner product of two rows of the same length.
#[inline(always)]
pub(crate) fn dot<F: Float>(a: &[F], b: &[F]) -> F {
    let mut sums = [F::ZERO; LANES];
    let (mut left, mut right) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (x, y) in (&mut left).zip(&mut right) {
        for ((x, y), sum) in x.iter().zip(y).zip(&mut sums) {
            *sum = x.mul_add(*y, *sum);
        }
    }
    for ((x, y), sum) in left
        .remainder()
        .iter()
        .zip(right.remainder())
        .zip(&mut sums)
    {
        *sum = x.mul_add(*y, *sum);
    }
    combine(
        sums,
        #[inline(always)]
        |a, b| a + b,
    )
}

#[inline(always)]
fn reduce<T: Element, F: Float>(row: &[T], start: F, step: impl Fn(F, T) -> F) -> [F; LANES] {
    let mut lanes = [start; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (x, lane) in chunk.iter().zip(&mut lanes) {
            *lane = step(*lane, *x);
        }
    }
    for (x, lane) in chunks.remainder().iter().zip(&mut lanes) {
        *lane = step(*lane, *x);
    }
    lanes
}

#[inline(always)]
fn combine<F: Float>(mut lanes: [F; LANES], step: impl Fn(F, F) -> F) -> F {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = step(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn against_plain_sums_at_every_length() {
        for len in 0..100 {
            let row: Vec<f64> = (0..len)
                .map(|i| ((i * 37 % 19) as f64 - 9.0) * 0.3)
                .collect();
            let other: Vec<f64> = row.iter().map(|x| 1.0 - x).collect();
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(maximum(&row), largest);
            let close = |got: f64, want: f64| {
                assert!(
                    (got - want).abs() <= 1e-12 * (1.0 + want.abs()),
                    "{got} {want}"
                );
            };
            close(
                dot(&row, &other),
                row.iter().zip(&other).map(|(x, y)| x * y).sum(),
            );
            close(
                sum_of_exp(&row, 0.5),
                row.iter().map(|x| (x - 0.5).exp()).sum(),
            );
            let mut powers = row.clone();
            let sum = exp_in_place(&mut powers, 2.0, 0.5);
            close(sum, row.iter().map(|x| (x * 2.0 - 0.5).exp()).sum());
            for (power, x) in powers.iter().zip(&row) {
                close(*power, (x * 2.0 - 0.5).exp());
            }
        }
    }
}
