//! Where products are cut: panels, blocks of the inner dimension, and the parts of threads.

use std::ops::Range;

/// Panels of the right operand are filled up to a multiple of this many columns, for every unit: so the
/// memory of panels is known before the unit is.
pub const PANEL_COLUMNS: usize = 64;

/// Their inner dimension is filled up to a multiple of this many words: a tile's.
pub(super) const PANEL_WORDS: usize = 16;

/// Words of the inner dimension in a panel, zeros at the end included.
pub fn panel_words(words: usize) -> usize {
    words.next_multiple_of(PANEL_WORDS)
}

/// Bytes of the panels of a right operand with this many words in a column.
pub fn panel_bytes(words: usize, columns: usize) -> usize {
    panel_words(words) * columns.next_multiple_of(PANEL_COLUMNS) * size_of::<u32>()
}

/// Words of an inner dimension up to which blocks of the left operand have twice the rows.
pub(super) const SHORT: usize = 1024;

/// Rows of the left operand in a block: a multiple of every unit's tile, so few that a block stays in
/// the second cache.
pub(super) fn block_rows(words: usize) -> usize {
    if words <= SHORT { 192 } else { 96 }
}

/// The blocks of the inner dimension, each of `step` words except the last.
pub(super) fn inner_blocks(words: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..words).step_by(step).map(move |start| start..words.min(start + step))
}

/// How threads cut a result: into groups of rows, and each of these into groups of panels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Groups of rows.
    pub rows: usize,
    /// Groups of panels.
    pub columns: usize,
}

impl Grid {
    /// For so many workers. Rows are cut as long as each group has two tiles' rows, since every group of
    /// columns copies the left operand again where it cannot be read in place.
    pub fn new([rows, panels]: [usize; 2], tile_rows: usize, workers: usize) -> Self {
        let fits = |columns: &usize| {
            workers.is_multiple_of(*columns) && rows >= workers / columns * 2 * tile_rows
        };
        let columns = (1..=workers.min(panels.max(1))).find(fits);
        // If nothing fits, as many groups of columns as there can be.
        let most = || (1..=workers.min(panels.max(1))).rfind(|c| workers.is_multiple_of(*c));
        let columns = columns.or_else(most).unwrap_or(1);
        Self { rows: workers / columns, columns }
    }

    /// A worker's rows and panels.
    pub fn part(self, worker: usize, [rows, panels]: [usize; 2]) -> [Range<usize>; 2] {
        let cut =
            |size: usize, part: usize, parts: usize| size * part / parts..size * (part + 1) / parts;
        [
            cut(rows, worker / self.columns, self.rows),
            cut(panels, worker % self.columns, self.columns),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_cover_a_result_once() {
        for workers in [1, 2, 3, 5, 8, 12, 16, 64] {
            for size in [[1, 1], [7, 3], [384, 18], [2048, 6], [100, 1], [16, 128]] {
                let grid = Grid::new(size, 32, workers);
                assert_eq!(grid.rows * grid.columns, workers);
                let mut seen = vec![0; size[0] * size[1]];
                for worker in 0..workers {
                    let [rows, panels] = grid.part(worker, size);
                    for at in rows.flat_map(|r| panels.clone().map(move |p| r * size[1] + p)) {
                        seen[at] += 1;
                    }
                }
                assert!(seen.iter().all(|&n| n == 1), "{workers} workers, {size:?}");
            }
        }
    }

    #[test]
    fn rows_are_cut_before_columns() {
        assert_eq!(Grid::new([2048, 18], 32, 16), Grid { rows: 16, columns: 1 });
        assert_eq!(Grid::new([384, 36], 32, 16), Grid { rows: 4, columns: 4 });
        assert_eq!(Grid::new([384, 36], 6, 16), Grid { rows: 16, columns: 1 });
        assert_eq!(Grid::new([10, 3], 32, 16), Grid { rows: 8, columns: 2 });
    }
}
