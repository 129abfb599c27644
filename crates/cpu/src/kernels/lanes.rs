//! Folds whose order is fixed, so that their results do not depend on the instruction set.
//!
//! A compiler may not reorder floating-point sums, so a plain loop over one accumulator does not
//! vectorise. Here element `i` always goes to accumulator `i % LANES`, and the accumulators are
//! combined in a fixed tree at the end.

use super::inlined::inlined;
use crate::element::{CpuElement, CpuFloat};

/// Accumulators; two 512-bit registers of singles.
pub(crate) const LANES: usize = 32;

/// Elements that are combined with each other before they join their accumulator, so that the time
/// an accumulator takes to come back from memory does not limit the loop.
const DEPTH: usize = 4;

/// Folds `term` over the elements of `K` equally long slices; `start` is neutral to `combine`.
#[inline(always)]
pub(crate) fn lane_fold<T: CpuElement, R: CpuFloat, const K: usize>(
    slices: [&[T]; K],
    start: R,
    term: impl Fn([T::Acc; K]) -> R,
    combine: impl Fn(R, R) -> R,
) -> R {
    let mut lanes = [start; LANES];
    let n = slices.iter().map(|slice| slice.len()).min().unwrap_or(0);
    let blocks = slices.map(|slice| slice.as_chunks::<{ LANES * DEPTH }>().0);
    for b in 0..n / (LANES * DEPTH) {
        let block = blocks.map(|blocks| &blocks[b]);
        for (j, lane) in lanes.iter_mut().enumerate() {
            let at = |k: usize| term(block.map(|block| block[k * LANES + j].load()));
            let pairs = (combine(at(0), at(1)), combine(at(2), at(3)));
            *lane = combine(*lane, combine(pairs.0, pairs.1));
        }
    }
    let rest = slices.map(|slice| &slice[n - n % (LANES * DEPTH)..n]);
    for first in (0..n % (LANES * DEPTH)).step_by(LANES) {
        let rest = rest.map(|rest| &rest[first..]);
        let count = rest.iter().map(|rest| rest.len()).min().unwrap_or(0);
        for (j, lane) in lanes.iter_mut().enumerate().take(count) {
            *lane = combine(*lane, term(rest.map(|rest| rest[j].load())));
        }
    }
    combine_lanes(lanes, combine)
}

/// The sum of `term` over the elements of `K` equally long slices.
#[inline(always)]
pub(crate) fn lane_sum<T: CpuElement, R: CpuFloat, const K: usize>(
    slices: [&[T]; K],
    term: impl Fn([T::Acc; K]) -> R,
) -> R {
    lane_fold(slices, R::ZERO, term, inlined!(|a, b| a + b))
}

/// Combines the accumulators, in a fixed tree.
#[inline(always)]
pub(crate) fn combine_lanes<R: CpuFloat>(mut lanes: [R; LANES], combine: impl Fn(R, R) -> R) -> R {
    for half in [16, 8, 4, 2, 1] {
        for j in 0..half {
            lanes[j] = combine(lanes[j], lanes[j + half]);
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_counts_once() {
        for n in [0, 1, 63, 64, 65, 127, 128, 1000] {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let y: Vec<f32> = (0..n).map(|i| 2.0 * i as f32 + 1.0).collect();
            let sum = lane_sum([&x, &y], |[a, b]| f64::from(a * b));
            let want: f64 = (0..n).map(|i| f64::from(i * (2 * i + 1))).sum();
            assert_eq!(sum, want, "{n} elements");
        }
    }
}
