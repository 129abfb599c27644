//! Initial values: each element is a pure function of the seed, the parameter's name and the element's
//! global index, so that a rank can make its own shard and every layout starts from the same weights.

use std::ops::Range;

use phalanx_ir::random::Stream;
use phalanx_ir::{Init, Param};

/// The elements `range` of a parameter's initial value, in full precision.
///
/// # Panics
/// If `range` reaches beyond the parameter.
pub fn initial_values(
    param: &Param,
    seed: u64,
    range: Range<usize>,
) -> impl ExactSizeIterator<Item = f64> + use<> {
    let (elements, init) = (param.elements(), param.init);
    assert!(range.end <= elements, "elements {range:?} of `{}`, which has {elements}", param.name);
    let stream = Stream::named(seed, &param.name);
    range.map(move |i| match init {
        Init::Constant(value) => value,
        Init::Normal(std) => std * stream.normal(i as u64),
        Init::Uniform(bound) => bound * (2.0 * stream.uniform(i as u64) - 1.0),
    })
}
