//! What the kernels' tests share: numbers to test with, comparison, numerical gradients.

use phalanx_ir::random::Stream;

use crate::element::{CpuElement, CpuFloat};

/// `n` standard normal numbers rounded to `T`, the same for the same `name`.
pub(crate) fn normals<T: CpuElement>(name: &str, n: usize) -> Vec<T> {
    let stream = Stream::named(1, name);
    (0..n as u64).map(|i| round(stream.normal(i))).collect()
}

/// The value of `T` nearest to `value`.
pub(crate) fn round<T: CpuElement>(value: f64) -> T {
    T::store(T::Acc::from_f64(value))
}

/// The elements as doubles.
pub(crate) fn doubles<T: CpuElement>(x: &[T]) -> Vec<f64> {
    x.iter().map(|v| v.load().to_f64()).collect()
}

/// Half a unit in the last place of one, times `slack`: how far a result rounded to `T` may be.
pub(crate) fn tolerance<T: CpuElement>(slack: f64) -> f64 {
    let digits = match T::DTYPE.size() {
        8 => 53,
        4 => 24,
        _ => 8,
    };
    slack * 2f64.powi(-digits)
}

/// Checks every element to `limit`, relative for numbers above one and absolute below.
#[track_caller]
pub(crate) fn assert_close<T: CpuElement>(got: &[T], want: &[f64], limit: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let g = g.load().to_f64();
        let error = (g - w).abs() / w.abs().max(1.0);
        assert!(error <= limit, "element {i}: {g} is not {w} (error {error:e}, allowed {limit:e})");
    }
}

/// The gradient of `f` at `x` by central differences.
pub(crate) fn numerical_gradient(x: &[f64], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let h = 1e-5;
    let mut at = x.to_vec();
    (0..x.len())
        .map(|i| {
            at[i] = x[i] + h;
            let above = f(&at);
            at[i] = x[i] - h;
            let below = f(&at);
            at[i] = x[i];
            (above - below) / (2.0 * h)
        })
        .collect()
}

/// The inner product: what a loss that weights every output by `b` amounts to.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Normal numbers times `factor`, rounded to `T`; the same ones for the same name.
pub(crate) fn random<T: CpuElement>(name: &str, len: usize, factor: f64) -> Vec<T> {
    let stream = Stream::named(9, name);
    (0..len as u64).map(|i| round(factor * stream.normal(i))).collect()
}
