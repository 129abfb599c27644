//! Sums and maxima over some of a tensor's dims.
//!
//! A tensor is viewed as `[outer, middle, inner]`, and the middle dim is reduced. All orders are
//! fixed, so a result does not depend on the instruction set; where threads split the elements of
//! the result, it does not depend on their number either.

use std::ops::Range;

use phalanx_ir::ops::ReduceKind;

use super::elementwise::larger;
use super::inlined::inlined;
use super::lanes::{lane_fold, lane_sum};
use crate::element::{CpuElement, CpuFloat, vectorized};

/// `[middle, inner] → [inner]`: reduces over all leading dims, for the given columns only.
///
/// `out` holds those columns, and takes part in the reduction if `accumulate`. A sum is taken in
/// the accumulator type; a maximum is NaN if any element is.
pub fn reduce_leading<T: CpuElement, C: CpuElement<Acc = T::Acc>>(
    op: ReduceKind,
    x: &[T],
    inner: usize,
    columns: Range<usize>,
    accumulate: bool,
    out: &mut [C],
) {
    match op {
        ReduceKind::Sum => {
            let add = inlined!(|a, b| a + b);
            columns_with(x, inner, columns, accumulate, out, T::Acc::ZERO, add);
        }
        ReduceKind::Max => {
            let max = inlined!(|a, b| larger(a, b));
            columns_with(x, inner, columns, accumulate, out, T::Acc::NEG_INFINITY, max);
        }
    }
}

/// `[outer, middle, inner] → [outer, inner]`, for as many outer indices as `x` holds.
pub fn reduce_middle<T: CpuElement, C: CpuElement<Acc = T::Acc>>(
    op: ReduceKind,
    x: &[T],
    middle: usize,
    inner: usize,
    accumulate: bool,
    out: &mut [C],
) {
    for (o, out) in out.chunks_exact_mut(inner.max(1)).enumerate() {
        let x = &x[o * middle * inner..][..middle * inner];
        reduce_leading(op, x, inner, 0..inner, accumulate, out);
    }
}

/// `[outer, inner] → [outer]`: reduces over all trailing dims, for as many rows as `x` holds.
pub fn reduce_trailing<T: CpuElement, C: CpuElement<Acc = T::Acc>>(
    op: ReduceKind,
    x: &[T],
    inner: usize,
    accumulate: bool,
    out: &mut [C],
) {
    vectorized(inlined!(|| {
        for (o, out) in out.iter_mut().enumerate() {
            let x = &x[o * inner..][..inner];
            let itself = inlined!(|[x]: [T::Acc; 1]| x);
            let old = out.load();
            let value = match op {
                ReduceKind::Sum => {
                    let sum = lane_sum([x], itself);
                    if accumulate { old + sum } else { sum }
                }
                ReduceKind::Max => {
                    let max = inlined!(|a, b| larger(a, b));
                    let top = lane_fold([x], T::Acc::NEG_INFINITY, itself, max);
                    if accumulate { larger(old, top) } else { top }
                }
            };
            *out = C::store(value);
        }
    }));
}

/// This thread's share of the sum of all elements, in double precision.
pub fn sum<T: CpuElement>(x: &[T]) -> f64 {
    vectorized(inlined!(|| lane_sum([x], inlined!(|[x]| x.to_f64()))))
}

/// This thread's share of the sum of all squares, in double precision: what a norm is made of.
pub fn sum_of_squares<T: CpuElement>(x: &[T]) -> f64 {
    vectorized(inlined!(|| lane_sum(
        [x],
        inlined!(|[x]| {
            let x = x.to_f64();
            x * x
        })
    )))
}

/// Columns that are reduced together: their accumulators stay in the first-level cache.
const COLUMNS: usize = 512;

/// Rows that are reduced into one partial result before it joins the total, so that the rounding
/// error of a sum grows with the root of the number of rows rather than with the number.
const ROWS: usize = 64;

fn columns_with<T: CpuElement, C: CpuElement<Acc = T::Acc>>(
    x: &[T],
    inner: usize,
    columns: Range<usize>,
    accumulate: bool,
    out: &mut [C],
    start: T::Acc,
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
) {
    vectorized(inlined!(|| {
        let firsts = columns.step_by(COLUMNS);
        for (first, out) in firsts.zip(out.chunks_mut(COLUMNS)) {
            let mut total = [start; COLUMNS];
            for rows in x.chunks(ROWS * inner) {
                let mut part = [start; COLUMNS];
                for row in rows.chunks_exact(inner) {
                    for (part, x) in part.iter_mut().zip(&row[first..first + out.len()]) {
                        *part = combine(*part, x.load());
                    }
                }
                for (total, part) in total.iter_mut().zip(&part[..out.len()]) {
                    *total = combine(*total, *part);
                }
            }
            for (out, &total) in out.iter_mut().zip(&total) {
                let value = if accumulate { combine(out.load(), total) } else { total };
                *out = C::store(value);
            }
        }
    }));
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{assert_close, doubles, normals, tolerance};
    use super::*;

    /// The middle dim reduced naively, in double precision.
    fn naive(op: ReduceKind, x: &[f64], [outer, middle, inner]: [usize; 3]) -> Vec<f64> {
        let mut out = Vec::new();
        for o in 0..outer {
            for i in 0..inner {
                let column = (0..middle).map(|m| x[(o * middle + m) * inner + i]);
                out.push(match op {
                    ReduceKind::Sum => column.sum(),
                    ReduceKind::Max => column.fold(f64::NEG_INFINITY, f64::max),
                });
            }
        }
        out
    }

    fn are_right<T: CpuElement>() {
        for op in [ReduceKind::Sum, ReduceKind::Max] {
            for shape @ [outer, middle, inner] in [[2, 3, 5], [1, 130, 1100], [3, 65, 1], [4, 1, 7]]
            {
                let x: Vec<T> = normals("x", outer * middle * inner);
                let mut out = vec![T::default(); outer * inner];
                // One rounding of the result, and those of the sum, which grow like its root.
                let limit = |terms: usize| {
                    tolerance::<T>(1.01) + tolerance::<T::Acc>(16.0 * (terms as f64).sqrt())
                };
                reduce_middle(op, &x, middle, inner, false, &mut out);
                assert_close(&out, &naive(op, &doubles(&x), shape), limit(middle));

                let mut out = vec![T::default(); outer];
                reduce_trailing(op, &x, middle * inner, false, &mut out);
                let want = naive(op, &doubles(&x), [outer, middle * inner, 1]);
                assert_close(&out, &want, limit(middle * inner));

                let columns = inner / 3..inner;
                let mut out = vec![T::default(); columns.len()];
                reduce_leading(op, &x, inner, columns.clone(), false, &mut out);
                let want = naive(op, &doubles(&x), [1, outer * middle, inner]);
                assert_close(&out, &want[columns], limit(outer * middle));
            }
        }
    }

    #[test]
    fn over_any_dims() {
        are_right::<f64>();
        are_right::<f32>();
        are_right::<bf16>();
    }

    #[test]
    fn shares_of_sums() {
        let x: Vec<f32> = normals("x", 10_001);
        let wide = doubles(&x);
        assert!((sum(&x) - wide.iter().sum::<f64>()).abs() < 1e-10);
        let squares: f64 = wide.iter().map(|x| x * x).sum();
        assert!((sum_of_squares(&x) - squares).abs() < 1e-9);
        // A single could not hold these squares, let alone their sum.
        assert_eq!(sum_of_squares(&[1e30f32, 1e30]), 2.0 * f64::from(1e30f32).powi(2));
    }

    #[test]
    fn nothing_sums_to_zero() {
        let mut out = [9.0f32; 2];
        reduce_trailing::<f32, f32>(ReduceKind::Sum, &[], 0, false, &mut out);
        assert_eq!(out, [0.0; 2]);
        reduce_middle::<f32, f32>(ReduceKind::Max, &[], 0, 1, false, &mut out);
        assert_eq!(out, [f32::NEG_INFINITY; 2]);
    }

    #[test]
    fn a_nan_is_the_maximum() {
        let mut x: Vec<f32> = normals("x", 300);
        x[123] = f32::NAN;
        let mut out = [0f32];
        reduce_trailing(ReduceKind::Max, &x, 300, false, &mut out);
        assert!(out[0].is_nan());
        let mut out = [0f32; 100];
        reduce_leading(ReduceKind::Max, &x, 100, 0..100, false, &mut out);
        assert!(out.iter().enumerate().all(|(i, v)| v.is_nan() == (i == 23)));
    }
}
