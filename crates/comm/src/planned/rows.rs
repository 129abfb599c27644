//! An all-to-all of regions of rows, of which only the rows that there are travel.
//!
//! Every rank has the counts of all regions that the call takes from one rank to another, so it knows what it
//! sends and what it gets without asking anybody. Where regions lie does not depend on counts.

use std::ops::Range;

use phalanx_ir::Axis;

use crate::blocks::Blocks;
use crate::call::CollectiveOp;

/// Which rows a rank gives and gets, found when its program is compiled.
#[derive(Clone, PartialEq, Debug)]
pub struct PlannedRows {
    /// The axes of the group, in its order.
    pub axes: Vec<Axis>,
    /// Where regions lie on both sides.
    pub blocks: Blocks,
    /// Elements of a region, and of a row.
    cell: usize,
    unit: usize,
    /// Runs of a region.
    runs: usize,
    /// For every rank and every region that it gets from here: which one it is among the counts.
    gives: Vec<usize>,
    /// The same of those that come from it, and which region of the result each of them is.
    takes: Vec<[usize; 2]>,
}

/// An all-to-all of a rank's part of a value.
pub(super) struct Moved<'a> {
    /// Its shape: regions, rows, width.
    pub(super) shape: &'a [usize],
    /// The dims that become whole and sharded.
    pub(super) dims: [usize; 2],
    /// Runs of a region.
    pub(super) runs: usize,
    /// How many ranks there are, and which one this is.
    pub(super) n: usize,
    pub(super) shard: usize,
}

impl PlannedRows {
    pub(super) fn new(axes: Vec<Axis>, blocks: Blocks, moved: Moved<'_>) -> Self {
        let Moved { shape, dims: [from, to], runs, n, shard } = moved;
        let (regions, rows) = shape.split_at(shape.len() - 2);
        // What goes from one rank to another: a part of the regions that the first one has.
        let part: Vec<usize> = regions
            .iter()
            .enumerate()
            .map(|(d, &len)| if d == to { len / n } else { len })
            .collect();
        let all: Vec<usize> = regions
            .iter()
            .enumerate()
            .map(|(d, &len)| if d == from { len * n } else { len })
            .collect();
        let got: Vec<usize> = part
            .iter()
            .enumerate()
            .map(|(d, &len)| if d == from { len * n } else { len })
            .collect();
        // The place of a region of that part in another box, in which it begins somewhere else along the two dims.
        let place = |of: &[usize], index: &[usize], starts: [usize; 2]| {
            (0..of.len()).fold(0, |at, d| {
                let start = if d == from {
                    starts[0]
                } else if d == to {
                    starts[1]
                } else {
                    0
                };
                at * of[d] + start * part[d] + index[d]
            })
        };
        let (mut gives, mut takes) = (Vec::new(), Vec::new());
        for member in 0..n {
            for at in 0..part.iter().product() {
                let index = &indices(&part, at)[..];
                gives.push(place(&all, index, [shard, member]));
                takes.push([place(&all, index, [member, shard]), place(&got, index, [member, 0])]);
            }
        }
        Self { axes, blocks, cell: rows.iter().product(), unit: rows[1], runs, gives, takes }
    }

    /// The call, before counts are known.
    pub fn op(&self) -> CollectiveOp<'static> {
        CollectiveOp::AllToAllRagged { cell: self.cell, unit: self.unit, send: &[], receive: &[] }
    }

    /// Lists for so many regions.
    pub fn lists(&self) -> FilledRows {
        FilledRows { send: vec![0; self.gives.len()], receive: vec![0; self.takes.len()] }
    }

    /// Fills the lists with what the counts of a step say; nothing is allocated.
    pub fn fill(&self, counts: &[i32], lists: &mut FilledRows) {
        // What is no count is too much for any region, so the call is refused.
        let rows = |region: usize| {
            let runs = counts[region * self.runs..(region + 1) * self.runs].iter();
            runs.fold(0usize, |sum, &run| {
                sum.saturating_add(usize::try_from(run).unwrap_or(usize::MAX))
            })
        };
        lists.send.iter_mut().zip(&self.gives).for_each(|(rows_of, &at)| *rows_of = rows(at));
        lists.receive.iter_mut().zip(&self.takes).for_each(|(own, &[at, _])| *own = rows(at));
    }

    /// The elements of the result that no rank sends.
    pub fn behind<'a>(&'a self, lists: &'a FilledRows) -> impl Iterator<Item = Range<usize>> {
        let of = |(&rows, &[_, place]): (&usize, &[usize; 2])| {
            let end = rows.saturating_mul(self.unit).min(self.cell);
            place * self.cell + end..(place + 1) * self.cell
        };
        lists.receive.iter().zip(&self.takes).map(of)
    }
}

/// How many rows of each region a rank sends and receives in a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FilledRows {
    send: Vec<usize>,
    receive: Vec<usize>,
}

impl FilledRows {
    /// The call with these rows.
    pub fn of<'a>(&'a self, op: CollectiveOp<'a>) -> CollectiveOp<'a> {
        match op {
            CollectiveOp::AllToAllRagged { cell, unit, .. } => CollectiveOp::AllToAllRagged {
                cell,
                unit,
                send: &self.send,
                receive: &self.receive,
            },
            other => other,
        }
    }
}

/// The index along each dim of the element at this place.
fn indices(shape: &[usize], mut at: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (own, &len) in index.iter_mut().zip(shape).rev() {
        *own = at % len;
        at /= len;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks; regions `[4, 2]` of two rows of one element, the second dim distributed.
    #[test]
    fn each_region_is_found_on_both_sides() {
        let moved = |shard| Moved { shape: &[4, 1, 2, 1], dims: [1, 0], runs: 1, n: 2, shard };
        let blocks = Blocks::contiguous(1);
        let planned = PlannedRows::new(vec![], blocks, moved(1));
        // Region (j, g) has the number 2·j + g. The second rank has g = 1, and gets j = 2 and 3.
        assert_eq!(planned.gives, [1, 3, 5, 7]);
        assert_eq!(planned.takes, [[4, 0], [6, 2], [5, 1], [7, 3]]);
        let mut lists = planned.lists();
        planned.fill(&[0, 1, 2, 0, 1, 2, 0, 1], &mut lists);
        assert_eq!((&lists.send[..], &lists.receive[..]), (&[1, 0, 2, 1][..], &[1, 0, 2, 1][..]));
        let behind: Vec<Range<usize>> = planned.behind(&lists).collect();
        assert_eq!(behind, [1..2, 4..6, 4..4, 7..8]);
        planned.fill(&[0, 0, 0, 0, -1, 0, 0, 0], &mut lists);
        assert_eq!(lists.receive[0], usize::MAX);
    }
}
