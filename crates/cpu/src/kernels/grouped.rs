//! Where the rows of an expert lie among packed rows.

use std::ops::Range;

/// Rows that are put side by side for one product: the gradient of a matrix is summed over so many rows
/// at a time, on any number of workers.
pub const CHUNK: usize = 512;

/// Packed rows as a rank holds them. What lies in padding is nobody's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grouped {
    /// The regions that are valid, in their order.
    pub regions: Vec<usize>,
    /// Regions of a part of the experts, with padding.
    pub of_part: usize,
    /// Parts of the experts, with padding.
    pub parts: usize,
    /// Rows that a region has room for.
    pub room: usize,
    /// Runs of a region, with padding and without.
    pub runs: [usize; 2],
    /// Experts of a part.
    pub experts: usize,
}

/// Rows that lie one behind the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnRows {
    /// Where they come among the rows that were asked for.
    pub at: usize,
    /// Where they lie.
    pub rows: Range<usize>,
}

impl Grouped {
    /// Experts that are here.
    pub fn all_experts(&self) -> usize {
        self.parts * self.experts
    }

    /// Rows that there is room for.
    pub fn all_rows(&self) -> usize {
        self.parts * self.of_part * self.room
    }

    /// The rows of a region that belong to an expert.
    pub fn used(&self, counts: &[i32], region: usize) -> Range<usize> {
        let first = region * self.room;
        let held = self.regions.binary_search(&region).is_ok();
        let runs = self.runs_of(counts, region).filter(|_| held);
        runs.last().map_or(first..first, |(_, rows)| first..rows.end)
    }

    /// Each run of a region: the expert, counted from the first of its part, and its rows.
    fn runs_of<'a>(
        &'a self,
        counts: &'a [i32],
        region: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
        let (mut next, end) = (region * self.room, (region + 1) * self.room);
        let [stride, runs] = self.runs;
        counts[region * stride..][..runs].iter().enumerate().map(move |(run, &count)| {
            let rows = next..end.min(next + usize::try_from(count).unwrap_or(0));
            next = rows.end;
            (run % self.experts, rows)
        })
    }

    /// The pieces of an expert's rows, of all regions.
    fn pieces_of<'a>(
        &'a self,
        counts: &'a [i32],
        expert: usize,
    ) -> impl Iterator<Item = Range<usize>> + 'a {
        let (part, expert) = (expert / self.experts, expert % self.experts);
        let own = self.regions.iter().filter(move |&&region| region / self.of_part == part);
        let runs = own.flat_map(|&region| self.runs_of(counts, region));
        runs.filter(move |(of, _)| *of == expert).map(|(_, rows)| rows)
    }

    /// How many rows an expert has.
    pub fn count(&self, counts: &[i32], expert: usize) -> usize {
        self.pieces_of(counts, expert).map(|rows| rows.len()).sum()
    }

    /// Where the rows of an expert lie, of which only those in a range are asked for.
    pub fn pieces<'a>(
        &'a self,
        counts: &'a [i32],
        expert: usize,
        range: Range<usize>,
    ) -> impl Iterator<Item = OwnRows> + 'a {
        let mut at = 0;
        self.pieces_of(counts, expert).filter_map(move |rows| {
            let first = at;
            at += rows.len();
            let (from, to) = (range.start.max(first), range.end.min(at));
            (from < to).then(|| OwnRows {
                at: from - range.start,
                rows: rows.start + from - first..rows.start + to - first,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_expert_are_found_in_all_regions() {
        // Two parts of two experts, two regions each, of which the last is padding; two runs of each expert.
        let of_part = 2;
        let grouped = Grouped {
            regions: vec![0, 1, 2],
            of_part,
            parts: 2,
            room: 10,
            runs: [4, 4],
            experts: 2,
        };
        let counts = [3, 0, 1, 2, 0, 4, 0, 0, 1, 1, 1, 1, 9, 9, 9, 9];
        let found = |expert, range| -> Vec<(usize, Range<usize>)> {
            grouped.pieces(&counts, expert, range).map(|p| (p.at, p.rows)).collect()
        };
        let counted: Vec<usize> = (0..4).map(|expert| grouped.count(&counts, expert)).collect();
        assert_eq!(counted, [4, 6, 2, 2]);
        assert_eq!(found(0, 0..4), [(0, 0..3), (3, 3..4)]);
        assert_eq!(found(1, 0..6), [(0, 4..6), (2, 10..14)]);
        assert_eq!(found(1, 1..4), [(0, 5..6), (1, 10..12)]);
        assert_eq!(found(3, 0..2), [(0, 21..22), (1, 23..24)]);
        let used: Vec<Range<usize>> = (0..4).map(|region| grouped.used(&counts, region)).collect();
        assert_eq!(used, [0..6, 10..14, 20..24, 30..30]);
    }
}
