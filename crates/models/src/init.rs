//! Initial values: each element is a pure function of the seed, the parameter's name and the element's
//! global index, so that a rank can make its own shard and every layout starts from the same weights.

use std::ops::Range;

use phalanx_ir::{Draw, Param};

/// The elements `range` of a parameter's initial value, in full precision.
///
/// # Panics
/// If `range` reaches beyond the parameter.
pub fn initial_values(
    param: &Param,
    seed: u64,
    range: Range<usize>,
) -> impl ExactSizeIterator<Item = f64> + use<> {
    let elements = param.elements();
    assert!(range.end <= elements, "elements {range:?} of `{}`, which has {elements}", param.name);
    let draw = Draw::of(param, seed);
    range.map(move |i| draw.at(i as u64))
}
