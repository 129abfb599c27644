//! Initial values: each element is a pure function of the seed, the parameter's name and the element's
//! global index, so that a rank can make its own shard and every layout starts from the same weights.

use std::ops::Range;

use half::bf16;
use phalanx_ir::random::Stream;
use phalanx_ir::{Init, Param};

/// A type that initial values are rounded to.
pub trait Real: Copy {
    /// The nearest number of this type.
    fn nearest(value: f64) -> Self;
}

impl Real for f64 {
    fn nearest(value: f64) -> Self {
        value
    }
}

impl Real for f32 {
    fn nearest(value: f64) -> Self {
        value as f32
    }
}

impl Real for bf16 {
    fn nearest(value: f64) -> Self {
        // By way of f32, as bf16 weights are copies of f32 masters.
        bf16::from_f32(value as f32)
    }
}

/// Writes the elements `range` of a parameter's initial value (row-major, global indices) to `out`.
///
/// # Panics
/// If `range` reaches beyond the parameter, or `out` has another length: the caller's mistake.
pub fn initialise<T: Real>(param: &Param, seed: u64, range: Range<usize>, out: &mut [T]) {
    assert_eq!(range.len(), out.len(), "the range and room of `{}`", param.name);
    for (place, value) in out.iter_mut().zip(initial_values(param, seed, range)) {
        *place = T::nearest(value);
    }
}

/// The elements `range` of a parameter's initial value, in full precision.
///
/// # Panics
/// If `range` reaches beyond the parameter.
pub fn initial_values(
    param: &Param,
    seed: u64,
    range: Range<usize>,
) -> impl Iterator<Item = f64> + use<> {
    let (elements, init) = (param.elements(), param.init);
    assert!(range.end <= elements, "elements {range:?} of `{}`, which has {elements}", param.name);
    let stream = Stream::named(seed, &param.name);
    range.map(move |i| match init {
        Init::Constant(value) => value,
        Init::Normal(std) => std * stream.normal(i as u64),
        Init::Uniform(bound) => bound * (2.0 * stream.uniform(i as u64) - 1.0),
    })
}
