//! What a piece of a file holds, in terms of the whole parameter.

use std::ops::Range;

use phalanx_ir::ops::Deal;
use serde::{Deserialize, Serialize};

/// The kind of a parameter's value in full precision.
pub const FULL: &str = "master";

/// The kind of its upper half, in `bf16`, if it is stored in halves of 16 bits ([`phalanx_ir::halves`]).
pub const UPPER: &str = "master.upper";

/// The kind of its lower half, in `u16`.
pub const LOWER: &str = "master.lower";

/// A rank's block of a parameter: a box of the whole, padded at the end of its dims.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ParamBlock {
    /// The shape of the whole parameter, without padding.
    pub shape: Vec<usize>,
    /// The first index of the block in each dim.
    pub start: Vec<usize>,
    /// The extent of the block in each dim, with its padding.
    pub extent: Vec<usize>,
    /// To how many ranks the first dim is distributed: as [`Param`](phalanx_ir::Param) says. It has no padding
    /// there then.
    #[serde(default = "in_order", skip_serializing_if = "is_in_order")]
    pub dealt: usize,
}

fn in_order() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_in_order(dealt: &usize) -> bool {
    *dealt == in_order()
}

/// A piece of a file: consecutive elements of a rank's block of one parameter's state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SavedEntry {
    /// The parameter's name.
    pub param: String,
    /// What is stored of it: `master` (its value in full precision), `exp_avg` and so on. The set
    /// is open: a reader refuses a kind that it does not know.
    pub kind: String,
    /// Which version of it, if several are kept; the newest is 0.
    #[serde(default)]
    pub version: usize,
    /// Which replica, if replicas differ.
    #[serde(default)]
    pub replica: usize,
    /// The block.
    pub block: ParamBlock,
    /// Which elements of the block, in row-major order with its padding.
    pub elements: Range<usize>,
}

/// Consecutive elements of a parameter that are consecutive in a file, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredRun {
    /// The first, by its row-major index in the whole parameter.
    pub global: usize,
    /// How many.
    pub len: usize,
    /// Where the first lies in the entry, in elements.
    pub at: usize,
}

impl ParamBlock {
    /// The whole of a parameter.
    pub fn whole(shape: &[usize]) -> Self {
        let (shape, start) = (shape.to_vec(), vec![0; shape.len()]);
        Self { extent: shape.clone(), shape, start, dealt: in_order() }
    }

    /// Whether its numbers fit together.
    pub fn is_sound(&self) -> bool {
        let dims = self.shape.len();
        let fits = |values: &[usize]| {
            let product = values.iter().try_fold(1_usize, |product, &n| product.checked_mul(n));
            values.len() == dims && product.is_some()
        };
        let ends = self.start.iter().zip(&self.extent).all(|(a, b)| a.checked_add(*b).is_some());
        let dealt = self.dealt == 1
            || self.shape.first().is_some_and(|&all| {
                self.dealt > 0
                    && all.is_multiple_of(self.dealt)
                    && self.start[0] + self.extent[0] <= all
            });
        fits(&self.shape) && self.start.len() == dims && fits(&self.extent) && ends && dealt
    }

    /// Elements, padding included.
    pub fn elements(&self) -> usize {
        self.extent.iter().product()
    }

    /// The valid elements of a range of the block, as runs of the whole parameter.
    pub fn runs(&self, elements: &Range<usize>) -> Vec<StoredRun> {
        let runs = self.placed(elements);
        let (Some((&experts, rest)), true) = (self.shape.split_first(), self.dealt > 1) else {
            return runs;
        };
        let (deal, each) = (Deal { experts, parts: self.dealt, per: 1 }, rest.iter().product());
        let own = |run: StoredRun| {
            let mut at = run.at;
            let stored = move |(global, len)| {
                at += len;
                StoredRun { global, len, at: at - len }
            };
            deal.runs(run.global..run.global + run.len, each).into_iter().map(stored)
        };
        runs.into_iter().flat_map(own).collect()
    }

    /// The same as if the first dim was not distributed.
    fn placed(&self, elements: &Range<usize>) -> Vec<StoredRun> {
        // Trailing dims that the block has whole form one row.
        let whole = |d: usize| self.start[d] == 0 && self.extent[d] == self.shape[d];
        let mut inner = self.shape.len();
        while inner > 1 && whole(inner - 1) {
            inner -= 1;
        }
        if self.shape.is_empty() {
            let len = elements.len().min(1);
            let run = StoredRun { global: 0, len, at: 0 };
            return (len > 0).then_some(run).into_iter().collect();
        }
        let width: usize = self.shape[inner..].iter().product();
        let last = inner - 1;
        let row = self.extent[last] * width;
        let valid =
            self.shape[last].saturating_sub(self.start[last]).min(self.extent[last]) * width;
        let mut runs: Vec<StoredRun> = Vec::new();
        if row == 0 {
            return runs;
        }
        for number in elements.start / row..elements.end.div_ceil(row) {
            let Some(first) = self.row_start(number, last, width) else { continue };
            let begin = elements.start.max(number * row) - number * row;
            let end = (elements.end - number * row).min(valid);
            if begin >= end {
                continue;
            }
            let at = number * row + begin - elements.start;
            let next = StoredRun { global: first + begin, len: end - begin, at };
            match runs.last_mut() {
                Some(run) if run.global + run.len == next.global && run.at + run.len == next.at => {
                    run.len += next.len;
                }
                _ => runs.push(next),
            }
        }
        runs
    }

    /// The global index of the first element of a row; nothing if the row is padding.
    fn row_start(&self, number: usize, last: usize, width: usize) -> Option<usize> {
        let (mut rest, mut global, mut stride) = (number, 0, self.shape[last] * width);
        for dim in (0..last).rev() {
            let index = self.start[dim] + rest % self.extent[dim];
            rest /= self.extent[dim];
            if index >= self.shape[dim] {
                return None;
            }
            global += index * stride;
            stride *= self.shape[dim];
        }
        Some(global + self.start[last] * width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The global indices of a range of a block, element by element; nothing for padding.
    fn by_hand(block: &ParamBlock, elements: Range<usize>) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for (at, element) in elements.enumerate() {
            let (mut rest, mut global, mut stride, mut valid) = (element, 0, 1, true);
            for dim in (0..block.shape.len()).rev() {
                let index = block.start[dim] + rest % block.extent[dim];
                rest /= block.extent[dim];
                valid &= index < block.shape[dim];
                global += index * stride;
                stride *= block.shape[dim];
            }
            if valid {
                found.push((global, at));
            }
        }
        found
    }

    #[test]
    fn runs_are_the_valid_elements_in_order() {
        let cases = [
            (vec![5, 7], vec![0, 0], vec![5, 7]),
            (vec![5, 7], vec![3, 0], vec![3, 7]),
            (vec![5, 7], vec![0, 4], vec![5, 4]),
            (vec![5, 7], vec![4, 4], vec![2, 4]),
            (vec![5, 7], vec![6, 0], vec![3, 7]),
            (vec![6], vec![4], vec![4]),
            (vec![], vec![], vec![]),
            (vec![3, 4, 5], vec![1, 0, 0], vec![2, 4, 5]),
            (vec![3, 4, 5], vec![0, 2, 0], vec![3, 3, 5]),
            (vec![3, 4, 5], vec![2, 2, 3], vec![2, 3, 3]),
        ];
        for (shape, start, extent) in cases {
            let block = ParamBlock { shape, start, extent, dealt: 1 };
            let all = block.elements();
            for first in 0..=all {
                for end in first..=all {
                    let runs = block.runs(&(first..end));
                    let flat =
                        runs.iter().flat_map(|r| (0..r.len).map(|i| (r.global + i, r.at + i)));
                    assert_eq!(flat.collect::<Vec<_>>(), by_hand(&block, first..end), "{block:?}");
                }
            }
        }
    }

    #[test]
    fn rows_of_whole_trailing_dims_are_one_run() {
        let block = ParamBlock {
            shape: vec![8, 3, 2],
            start: vec![2, 0, 0],
            extent: vec![4, 3, 2],
            dealt: 1,
        };
        assert_eq!(block.runs(&(0..24)), [StoredRun { global: 12, len: 24, at: 0 }]);
    }

    /// Eight experts that are distributed to four ranks: the second one has experts 1 and 5, cut by columns here.
    #[test]
    fn dealt_blocks_are_the_experts_of_their_rank() {
        let (shape, start) = (vec![8, 3, 4], vec![2, 0, 2]);
        let block = ParamBlock { shape, start, extent: vec![2, 3, 2], dealt: 4 };
        assert!(block.is_sound());
        let expected = [1, 5].map(|expert| [0, 1, 2].map(|row| expert * 12 + row * 4 + 2));
        let runs = block.runs(&(0..12)).into_iter();
        let expected = expected.as_flattened().iter().enumerate();
        let expected: Vec<_> =
            expected.map(|(i, &global)| StoredRun { global, len: 2, at: 2 * i }).collect();
        assert_eq!(runs.collect::<Vec<_>>(), expected);
        let uneven = ParamBlock { dealt: 3, ..block.clone() };
        let padded = ParamBlock { start: vec![7, 0, 2], ..block };
        assert!(!uneven.is_sound() && !padded.is_sound());
    }
}
