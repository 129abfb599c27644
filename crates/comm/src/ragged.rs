//! Which elements of a block move if its cells are filled in part.
//!
//! A cell is a region that is filled from the front; how far is known when the call starts. Both sides of a
//! call know it of every cell, so each finds its own memory and nothing is asked for.

use crate::call::{Call, CollectiveOp};

/// What a ragged call receives.
#[derive(Default)]
pub(crate) struct Cells {
    cell: usize,
    unit: usize,
    counts: Vec<usize>,
}

/// Elements of a block that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) outer: usize,
    pub(crate) row: usize,
    /// The first element in the row.
    pub(crate) column: usize,
    pub(crate) len: usize,
}

impl Cells {
    /// What a call receives, in the memory that this list has; nothing for other calls.
    pub(crate) fn refilled(mut self, op: CollectiveOp<'_>) -> Self {
        self.counts.clear();
        if let CollectiveOp::AllToAllRagged { cell, unit, receive, .. } = op {
            (self.cell, self.unit) = (cell, unit);
            self.counts.extend_from_slice(receive);
        }
        self
    }

    /// The runs of the block from a member, in a group of `n`; blocks have this `outer`, `rows` and `len`.
    pub(crate) fn runs(
        &self,
        [_, rows, len]: [usize; 3],
        member: usize,
        n: usize,
    ) -> impl Iterator<Item = Run> {
        let (cells, each) = (len / self.cell.max(1), self.counts.len() / n);
        let own = &self.counts[member * each..(member + 1) * each];
        let run = move |(at, &count): (usize, &usize)| {
            let (row, column) = (at / cells, at % cells * self.cell);
            Run { outer: row / rows, row: row % rows, column, len: count * self.unit }
        };
        own.iter().enumerate().map(run).filter(|run| run.len > 0)
    }
}

/// For each of `n` members the sum over its part of a list of counts.
pub(crate) fn totals(counts: &[usize], n: usize) -> impl Iterator<Item = usize> {
    let each = counts.len() / n;
    (0..n).map(move |member| counts[member * each..(member + 1) * each].iter().sum())
}

/// For each of `n` members and each cell of its block, how many bytes the block has to the cell's end.
pub(crate) fn cells_end(counts: &[usize], n: usize, unit: usize) -> impl Iterator<Item = usize> {
    let (each, mut end) = (counts.len() / n, 0);
    counts.iter().enumerate().map(move |(at, count)| {
        end = if at % each == 0 { 0 } else { end } + count * unit;
        end
    })
}

/// What is wrong with the lists of a ragged call in a group of `n`.
pub(crate) fn problem(call: &Call<'_>, n: usize) -> Option<String> {
    let CollectiveOp::AllToAllRagged { cell, unit, send, receive } = call.op else { return None };
    let len = call.blocks.len;
    if cell == 0 || unit == 0 || !len.is_multiple_of(cell) || !cell.is_multiple_of(unit) {
        return Some(format!("rows of {len} elements in cells of {cell}, in units of {unit}"));
    }
    let each = call.blocks.outer.saturating_mul(call.blocks.rows).saturating_mul(len / cell);
    let needed = n.saturating_mul(each);
    if send.len() != needed || receive.len() != needed {
        let (gives, takes) = (send.len(), receive.len());
        return Some(format!("it needs {needed} counts on both sides, not {gives} and {takes}"));
    }
    let most = cell / unit;
    let more = send.iter().chain(receive).find(|count| **count > most)?;
    Some(format!("{more} units of a cell that has room for {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_lie_at_the_front_of_their_cells() {
        let cells = Cells { cell: 6, unit: 2, counts: vec![9, 9, 9, 9, 3, 0, 1, 2] };
        let found: Vec<Run> = cells.runs([2, 1, 12], 1, 2).collect();
        let run = |outer, column, len| Run { outer, row: 0, column, len };
        assert_eq!(found, [run(0, 0, 6), run(1, 0, 2), run(1, 6, 4)]);
        assert_eq!(totals(&cells.counts, 2).collect::<Vec<_>>(), [36, 6]);
    }
}
