//! Folds whose order is fixed, so that their results do not depend on the instruction set.
//!
//! A compiler may not reorder floating-point sums, so a plain loop over one accumulator does not
//! vectorise. Here element `i` always goes to accumulator `i % LANES`, and the accumulators are
//! combined in a fixed tree at the end.

use super::inlined::inlined;
use crate::element::{Element, Float};

/// Enough independent accumulators to hide the latency of additions in 512-bit registers.
const LANES: usize = 64;

/// Folds `term` over the elements of `K` equally long slices.
#[inline(always)]
pub(crate) fn lane_fold<T: Element, R: Float, const K: usize>(
    slices: [&[T]; K],
    start: R,
    term: impl Fn([T::Acc; K]) -> R,
    combine: impl Fn(R, R) -> R,
) -> R {
    let parts = slices.map(|slice| slice.as_chunks::<LANES>());
    let whole = parts.iter().map(|(chunks, _)| chunks.len()).min();
    let mut lanes = [start; LANES];
    for c in 0..whole.unwrap_or(0) {
        let chunk = parts.map(|(chunks, _)| &chunks[c]);
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane = combine(*lane, term(chunk.map(|values| values[j].load())));
        }
    }
    let rest = parts.iter().map(|(_, rest)| rest.len()).min();
    for (j, lane) in lanes.iter_mut().enumerate().take(rest.unwrap_or(0)) {
        *lane = combine(*lane, term(parts.map(|(_, rest)| rest[j].load())));
    }
    let lanes: [R; 32] = halve(lanes, &combine);
    let lanes: [R; 16] = halve(lanes, &combine);
    let lanes: [R; 8] = halve(lanes, &combine);
    let lanes: [R; 4] = halve(lanes, &combine);
    let [a, b]: [R; 2] = halve(lanes, &combine);
    combine(a, b)
}

/// Combines the upper half of the accumulators into the lower.
#[inline(always)]
fn halve<R: Float, const N: usize, const H: usize>(
    lanes: [R; N],
    combine: impl Fn(R, R) -> R,
) -> [R; H] {
    std::array::from_fn(|j| combine(lanes[j], lanes[j + H]))
}

/// The sum of `term` over the elements of `K` equally long slices.
#[inline(always)]
pub(crate) fn lane_sum<T: Element, R: Float, const K: usize>(
    slices: [&[T]; K],
    term: impl Fn([T::Acc; K]) -> R,
) -> R {
    lane_fold(slices, R::ZERO, term, inlined!(|a, b| a + b))
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
