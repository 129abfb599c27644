//! Rows of matrices, for updates that keep numbers of rows and columns.

use super::inlined::inlined;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// Adds squares to sums in double precision; there are at least as many sums as values.
pub fn add_squares<T: CpuElement>(values: &[T], sums: &mut [f64]) {
    vectorized(inlined!(|| {
        for (sum, value) in sums.iter_mut().zip(values) {
            let value = value.load().to_f64();
            *sum += value * value;
        }
    }))
}

/// Values times a factor, each divided by the number of its column.
pub fn divide<T: CpuElement>(values: &[T], by: T::Acc, columns: &[T::Acc], out: &mut [T::Acc]) {
    vectorized(inlined!(|| {
        for ((out, value), column) in out.iter_mut().zip(values).zip(columns) {
            *out = value.load() * by / *column;
        }
    }))
}
