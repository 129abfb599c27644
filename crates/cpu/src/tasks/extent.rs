//! The part of a value that a rank holds: which elements are padding, and where its elements lie in
//! the whole value.

use std::ops::Range;

use phalanx_ir::{LocalPart, ValueId};

use super::{Operation, Var};

impl Var {
    /// Whether no element is padding.
    pub(crate) fn is_full(&self) -> bool {
        self.valid == self.shape
    }

    /// Whether no row is padding; a row may still end in some.
    pub(crate) fn rows_are_full(&self) -> bool {
        let rows = self.shape.len().saturating_sub(1);
        self.valid[..rows] == self.shape[..rows]
    }

    /// The valid elements of a valid row.
    pub(crate) fn valid_width(&self) -> usize {
        self.valid.last().copied().unwrap_or(1)
    }

    /// The valid rows, as ranges of neighbours.
    pub(crate) fn row_runs(&self) -> Vec<Range<usize>> {
        let rows = self.shape.len().saturating_sub(1);
        runs(&self.shape[..rows], &self.valid[..rows])
    }

    /// The valid elements, as ranges of neighbours.
    pub(crate) fn runs(&self) -> Vec<Range<usize>> {
        runs(&self.shape, &self.valid)
    }
}

/// Ranges of elements, in row-major order, whose index along every dim is below what is valid.
fn runs(shape: &[usize], valid: &[usize]) -> Vec<Range<usize>> {
    if valid.contains(&0) {
        return Vec::new();
    }
    let full = shape.iter().zip(valid).rev().take_while(|(size, valid)| size == valid).count();
    let (outer, cut) = match shape.len() - full {
        // Nothing is padded: all elements are one range.
        0 => (0, 1),
        dims => (dims - 1, valid[dims - 1]),
    };
    let inner: usize = shape[shape.len() - full..].iter().product();
    let stride: usize = shape[outer..].iter().product();
    let mut starts = vec![0];
    for (size, valid) in shape[..outer].iter().zip(valid) {
        starts = starts.iter().flat_map(|s| (0..*valid).map(move |i| s * size + i)).collect();
    }
    starts.into_iter().map(|s| s * stride..s * stride + cut * inner).collect()
}

/// What two ranges have in common.
pub(crate) fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The pieces of a range that lie outside all of these runs, which are in order.
pub(crate) fn gaps(runs: &[Range<usize>], own: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let ends = runs.iter().map(|r| r.end);
    let starts = runs.iter().map(|r| r.start).chain([usize::MAX]);
    let between = [0].into_iter().chain(ends).zip(starts).map(|(a, b)| a..b.max(a));
    between.map(move |gap| common(&gap, &own)).filter(|gap| !gap.is_empty())
}

impl Operation<'_> {
    /// The part of a value's dim that this rank holds.
    pub(crate) fn part(&self, value: ValueId, dim: usize) -> LocalPart {
        self.program.ty(value).part(dim, self.program.mesh(), self.rank)
    }

    /// The parts of all dims of a value.
    pub(crate) fn parts(&self, value: ValueId) -> Vec<LocalPart> {
        (0..self.program.ty(value).shape.len()).map(|dim| self.part(value, dim)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_gaps_are_all_elements() {
        for (shape, valid) in [
            (vec![], vec![]),
            (vec![6], vec![4]),
            (vec![3, 4], vec![3, 4]),
            (vec![3, 4], vec![2, 4]),
            (vec![3, 4], vec![3, 1]),
            (vec![3, 2, 4], vec![2, 1, 4]),
            (vec![3, 4, 2], vec![3, 0, 2]),
            (vec![2, 3, 2, 2], vec![1, 2, 2, 1]),
        ] {
            let n: usize = shape.iter().product();
            let holds = |index: usize| {
                let mut rest = index;
                shape.iter().zip(&valid).rev().all(|(size, valid)| {
                    let at = rest % size;
                    rest /= size;
                    at < *valid
                })
            };
            let expected: Vec<usize> = (0..n).filter(|&i| holds(i)).collect();
            let runs = runs(&shape, &valid);
            assert_eq!(runs.iter().cloned().flatten().collect::<Vec<_>>(), expected);
            for own in [0..n, n / 3..n - n / 4] {
                let found: Vec<usize> = gaps(&runs, own.clone()).flatten().collect();
                assert_eq!(found, own.filter(|&i| !holds(i)).collect::<Vec<_>>(), "{shape:?}");
            }
        }
    }
}
