//! What the tests of several kernels share.

use phalanx_ir::random::Stream;

use crate::element::{Element, Float};

/// Normal numbers times `factor`, rounded to `T`; the same ones for the same name.
pub(crate) fn random<T: Element>(name: &str, len: usize, factor: f64) -> Vec<T> {
    let stream = Stream::named(9, name);
    (0..len as u64)
        .map(|i| T::store(T::Acc::from_f64(factor * stream.normal(i))))
        .collect()
}

/// The values as doubles.
pub(crate) fn doubles<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.load().to_f64()).collect()
}
