//! Softmax of rows, and its gradient.
//!
//! Slices whose lengths do not fit each other are a mistake of the caller and panic. A row that
//! holds a NaN, a positive infinity or nothing but negative infinities has no softmax: all of it
//! becomes NaN.

use super::inlined::inlined;
use super::row;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// `out = exp(x) / Σ exp(x)` for every row of `width` elements.
///
/// One pass finds the largest element and the sum, the other the results. The exponentials are
/// computed twice rather than kept in `out`, where they would be rounded before their division.
pub fn softmax<T: CpuElement>(x: &[T], width: usize, out: &mut [T]) {
    check_lengths(width, [x.len(), out.len()]);
    // Without elements there are no rows, and any width is valid.
    let width = width.max(1);
    vectorized(inlined!(|| {
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let (max, sum) = row::maximum_and_sum_of_exp(x);
            softmax_row(x, max, T::Acc::ONE / sum, out);
        }
    }));
}

/// The gradient of [`softmax`] from its result: `dx = y · (dy − Σ y·dy)` for every row.
pub fn gradient<T: CpuElement>(y: &[T], dy: &[T], width: usize, dx: &mut [T]) {
    check_lengths(width, [y.len(), dx.len()]);
    check_lengths(width, [dy.len(), dx.len()]);
    let width = width.max(1);
    vectorized(inlined!(|| {
        let given = y.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((y, dy), dx) in given.zip(dx.chunks_exact_mut(width)) {
            gradient_row(y, dy, row::dot(y, dy), dx);
        }
    }));
}

#[inline(always)]
pub(super) fn softmax_row<T: CpuElement>(x: &[T], max: T::Acc, factor: T::Acc, out: &mut [T]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = T::store((x.load() - max).exp() * factor);
    }
}

#[inline(always)]
pub(super) fn gradient_row<T: CpuElement>(y: &[T], dy: &[T], along: T::Acc, dx: &mut [T]) {
    for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
        *dx = T::store(y.load() * (dy.load() - along));
    }
}

fn check_lengths(width: usize, [given, result]: [usize; 2]) {
    assert_eq!(given, result);
    assert!(
        given == 0 || given.is_multiple_of(width),
        "{given} elements are not whole rows of {width}"
    );
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{
        assert_close, dot, doubles, normals, numerical_gradient, tolerance,
    };
    use super::*;

    /// By the definition, in double precision.
    fn naive(x: &[f64], width: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for row in x.chunks(width) {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            out.extend(row.iter().map(|x| x.exp() / sum));
        }
        out
    }

    fn is_right<T: CpuElement>() {
        for (rows, width) in [(1, 1), (5, 3), (3, 33), (2, 129), (2, 1000), (1, 5003)] {
            let x: Vec<T> = normals("x", rows * width);
            let mut out = vec![T::default(); x.len()];
            softmax(&x, width, &mut out);
            let want = naive(&doubles(&x), width);
            // One rounding of the result, those of the sum, and those of the naive version.
            let limit = tolerance::<T>(1.01) + tolerance::<T::Acc>(16.0) + 1e-14;
            // Relative, because the probabilities of wide rows are small.
            for (i, (got, want)) in doubles(&out).iter().zip(&want).enumerate() {
                let error = (got / want - 1.0).abs();
                assert!(error <= limit, "{i} of {width}: {error:e}");
            }
        }
    }

    #[test]
    fn rows_of_any_width() {
        is_right::<f64>();
        is_right::<f32>();
        is_right::<bf16>();
        softmax::<f32>(&[], 0, &mut []);
        gradient::<f32>(&[], &[], 7, &mut []);
    }

    fn gradient_is_right<T: CpuElement>() {
        for (rows, width) in [(1, 1), (5, 3), (2, 37), (1, 130)] {
            let x: Vec<f64> = normals("x", rows * width);
            let dy: Vec<T> = normals("dy", rows * width);
            let mut y = vec![0.0; x.len()];
            softmax(&x, width, &mut y);
            let y: Vec<T> = y.iter().map(|y| T::store(T::Acc::from_f64(*y))).collect();
            let mut dx = vec![T::default(); x.len()];
            gradient(&y, &dy, width, &mut dx);
            let want = numerical_gradient(&x, |x| dot(&naive(x, width), &doubles(&dy)));
            assert_close(&dx, &want, tolerance::<T>(16.0).max(1e-9));
        }
    }

    #[test]
    fn gradients_against_differences() {
        gradient_is_right::<f64>();
        gradient_is_right::<f32>();
        gradient_is_right::<bf16>();
    }

    #[test]
    fn large_numbers_do_not_overflow() {
        let mut out = [0f32; 4];
        softmax(&[1e30, 1e30, -1e30, f32::NEG_INFINITY], 4, &mut out);
        assert_eq!(out, [0.5, 0.5, 0.0, 0.0]);
        softmax(&[f32::MIN; 4], 4, &mut out);
        assert_eq!(out, [0.25; 4]);
    }

    #[test]
    fn rows_without_a_softmax_are_nan_and_alone_so() {
        const INF: f32 = f32::INFINITY;
        for bad in [[-INF, -INF], [f32::NAN, 1.0], [INF, 1.0], [-INF, f32::NAN]] {
            let mut out = [0.0; 4];
            softmax(&[bad[0], bad[1], 3.0, 3.0], 2, &mut out);
            assert!(out[0].is_nan() && out[1].is_nan(), "{bad:?}: {out:?}");
            assert_eq!(out[2..], [0.5; 2]);
        }
    }
}
