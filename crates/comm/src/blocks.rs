//! The data of a call: what one rank contributes to, or gets from, one other.
//!
//! A block is a strided box of `outer × rows × len` elements, so that gathering along any dim of a
//! row-major tensor, and moving a shard from one dim to another, need no extra copies.

use std::ops::Range;

/// Distances in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Strides {
    /// From one block to the next.
    pub block: usize,
    /// From one `outer` index to the next, within a block.
    pub outer: usize,
    /// From one row to the next, within an `outer` index.
    pub row: usize,
}

/// The shape of one block, and where blocks lie on either side of a call.
///
/// All members must give the same `outer`, `rows` and `len`; strides may differ between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// How many groups of rows.
    pub outer: usize,
    /// How many rows in each.
    pub rows: usize,
    /// How many contiguous elements in each row.
    pub len: usize,
    /// Where blocks lie in the buffer that is given.
    pub source: Strides,
    /// Where blocks lie in the buffer that is received into.
    pub target: Strides,
}

impl Blocks {
    /// Blocks of `count` contiguous elements, one directly after the other on both sides.
    pub fn contiguous(count: usize) -> Self {
        let strides = Strides { block: count, outer: count, row: count };
        Self { outer: 1, rows: 1, len: count, source: strides, target: strides }
    }

    /// Gathering along a dim: every rank gives a row-major `[outer, mid, inner]`, and
    /// `[outer, n·mid, inner]` is received.
    pub fn gather(n: usize, outer: usize, mid: usize, inner: usize) -> Self {
        let len = mid * inner;
        Self {
            outer: 1,
            rows: outer,
            len,
            source: Strides { block: outer * len, outer: outer * len, row: len },
            target: Strides { block: len, outer: outer * n * len, row: n * len },
        }
    }

    /// Scattering along a dim: every rank gives a row-major `[outer, n·mid, inner]`, of which
    /// `[outer, mid, inner]` is received (reduced or not).
    pub fn scatter(n: usize, outer: usize, mid: usize, inner: usize) -> Self {
        let gather = Self::gather(n, outer, mid, inner);
        Self { source: gather.target, target: gather.source, ..gather }
    }

    /// All-to-all from one dim to another: every rank gives a row-major tensor of `shape`, of which
    /// dim `to` is cut into `n` parts; it receives `shape` with dim `to` divided by `n` and dim
    /// `from` multiplied by `n`. `None` unless the dims differ, exist, and `n` divides `to`'s.
    pub fn all_to_all(n: usize, shape: &[usize], from: usize, to: usize) -> Option<Self> {
        if from == to || from.max(to) >= shape.len() || !shape[to].is_multiple_of(n) {
            return None;
        }
        let (first, second) = (from.min(to), from.max(to));
        let product = |dims: &[usize]| dims.iter().product::<usize>();
        let (outer, middle) = (product(&shape[..first]), product(&shape[first + 1..second]));
        let inner = product(&shape[second + 1..]);
        // Per `outer` index the block is `rows` rows of `len` elements: rows run over the first of
        // the two dims and all between, a row over the second and all behind it. On one side rows
        // lie densely within an `outer` index, on the other they are n times as far apart.
        let (first_part, second_part) = if to == first {
            (shape[first] / n, shape[second])
        } else {
            (shape[first], shape[second] / n)
        };
        let (rows, len) = (first_part * middle, second_part * inner);
        let dense = Strides { block: rows * len, outer: n * rows * len, row: len };
        let apart = Strides { block: len, outer: n * rows * len, row: n * len };
        let (source, target) = if to == first { (dense, apart) } else { (apart, dense) };
        Some(Self { outer, rows, len, source, target })
    }

    /// Elements of one block.
    pub fn count(&self) -> usize {
        self.outer.saturating_mul(self.rows).saturating_mul(self.len)
    }

    /// Whether a block is one run of elements on both sides.
    pub fn is_contiguous(&self) -> bool {
        let dense = |strides: &Strides| {
            (self.rows <= 1 || strides.row == self.len)
                && (self.outer <= 1 || strides.outer == self.rows * self.len)
        };
        dense(&self.source) && dense(&self.target)
    }

    /// Elements from the start of a buffer to the end of the last of `blocks` blocks; `None` if
    /// that overflows.
    pub(crate) fn span(&self, strides: &Strides, blocks: usize) -> Option<usize> {
        if blocks == 0 || self.count() == 0 {
            return Some(0);
        }
        let last = |count: usize, stride: usize| (count - 1).checked_mul(stride);
        last(blocks, strides.block)?
            .checked_add(last(self.outer, strides.outer)?)?
            .checked_add(last(self.rows, strides.row)?)?
            .checked_add(self.len)
    }
}

/// The elements of part `index` if `count` elements are divided as evenly as possible among `n`.
pub(crate) fn part(count: usize, n: usize, index: usize) -> Range<usize> {
    // The same as `count * i / n`, without the risk of overflow.
    let bound = |i: usize| count / n * i + count % n * i / n;
    bound(index)..bound(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places of block `b` in iteration order.
    fn places(blocks: &Blocks, strides: &Strides, b: usize) -> Vec<usize> {
        let mut places = Vec::new();
        for o in 0..blocks.outer {
            for r in 0..blocks.rows {
                let start = b * strides.block + o * strides.outer + r * strides.row;
                places.extend(start..start + blocks.len);
            }
        }
        places
    }

    #[test]
    fn every_element_of_both_sides_is_touched_once() {
        let shape = [2, 6, 3, 6, 5];
        let n = 3;
        for (from, to) in [(1, 3), (3, 1), (0, 1), (1, 0), (4, 3), (3, 4), (0, 3)] {
            let Some(blocks) = Blocks::all_to_all(n, &shape, from, to) else {
                assert_ne!(shape[to] % n, 0, "{from} -> {to}");
                continue;
            };
            let total: usize = shape.iter().product();
            for strides in [blocks.source, blocks.target] {
                let mut all: Vec<usize> =
                    (0..n).flat_map(|b| places(&blocks, &strides, b)).collect();
                all.sort_unstable();
                assert_eq!(all, (0..total).collect::<Vec<_>>(), "{from} -> {to}");
                assert_eq!(blocks.span(&strides, n), Some(total));
            }
        }
    }

    #[test]
    fn a_span_that_is_no_number_is_none() {
        let mut blocks = Blocks::contiguous(4);
        blocks.source.block = usize::MAX;
        assert_eq!(blocks.span(&blocks.source, 3), None);
        assert_eq!(blocks.span(&blocks.target, 3), Some(12));
    }
}
