//! The bytes of a strided block, in the order in which they go over a stream.

use crate::kernel::Place;

/// A run of a strided block that has at least so many bytes goes over a stream by itself; shorter ones are
/// packed, because a system call costs more than a copy of some KiB.
const LONG: usize = 8 << 10;

/// The most bytes that are packed at once.
pub(super) const PACKED: usize = 64 << 10;

/// A block of memory that is sent from or received into.
#[derive(Clone, Copy)]
pub(super) struct Region {
    pub(super) place: Place,
    /// `outer`, `rows` and bytes of a row.
    pub(super) shape: [usize; 3],
    /// If only the first bytes of its cells count.
    pub(super) cut: Option<Cut>,
}

/// Cells of a block that are filled in part.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// For each cell, how many bytes the block has to its end; the list belongs to the call, as memory does.
    pub(super) ends: *const usize,
    /// How many cells there are.
    pub(super) cells: usize,
    /// Bytes of a cell that is full.
    pub(super) cell: usize,
}

impl Cut {
    fn ends(&self) -> &[usize] {
        // SAFETY: the call outlives the regions of its blocks, and does not change its list.
        unsafe { std::slice::from_raw_parts(self.ends, self.cells) }
    }

    /// The cell in which byte `at` lies, and the first byte of it and behind it.
    fn find(&self, at: usize) -> (usize, [usize; 2]) {
        let ends = self.ends();
        let cell = ends.partition_point(|&end| end <= at);
        (cell, [if cell == 0 { 0 } else { ends[cell - 1] }, ends[cell]])
    }
}

impl Region {
    pub(super) fn new(place: Place, shape: [usize; 3]) -> Self {
        let dense = place.is_dense(shape);
        let shape = if dense { [1, 1, shape.iter().product()] } else { shape };
        Self { place, shape, cut: None }
    }

    /// Contiguous bytes.
    pub(super) fn flat(base: *mut u8, bytes: usize) -> Self {
        Self {
            place: Place { base, outer: 0, row: 0, foreign: false },
            shape: [1, 1, bytes],
            cut: None,
        }
    }

    /// Takes in a contiguous block that lies right behind this one; says whether it does.
    pub(super) fn grow(&mut self, next: &Region) -> bool {
        let (None, None) = (self.cut, next.cut) else { return false };
        let ([1, 1, own], [1, 1, more]) = (self.shape, next.shape) else { return false };
        let follows = self.place.base.wrapping_add(own) == next.place.base;
        self.shape[2] += if follows { more } else { 0 };
        follows
    }

    /// How many bytes there are.
    pub(super) fn bytes(&self) -> usize {
        match self.cut {
            None => self.shape.iter().product(),
            Some(cut) => cut.ends().last().copied().unwrap_or(0),
        }
    }

    /// Copies the bytes to where those of another block of as many lie.
    ///
    /// # Safety
    /// Both blocks are this thread's, and do not overlap.
    pub(super) unsafe fn copy_to(&self, to: &Region) {
        let mut at = 0;
        while at < self.bytes() {
            let ((from, len), (into, room)) = (self.run(at), to.run(at));
            let now = len.min(room);
            // SAFETY: both runs lie inside their blocks, which the caller guarantees.
            unsafe { std::ptr::copy_nonoverlapping(from, into, now) };
            at += now;
        }
    }

    /// The contiguous run that begins at byte `at`, and its length.
    fn run(&self, at: usize) -> (*mut u8, usize) {
        let [_, rows, len] = self.shape;
        if let Some(cut) = self.cut {
            let ((cell, [start, end]), cells) = (cut.find(at), len / cut.cell);
            let (row, column) = (cell / cells, cell % cells * cut.cell + at - start);
            return (self.place.at(row / rows, row % rows).wrapping_add(column), end - at);
        }
        let (row, column) = (at / len, at % len);
        (self.place.at(row / rows, row % rows).wrapping_add(column), len - column)
    }

    /// The first of the bytes `at..at + count` that lie together, if they are enough to go by themselves.
    fn long_run(&self, at: usize, count: usize) -> Option<(*mut u8, usize)> {
        let count = count.min(self.bytes() - at);
        let (base, len) = self.run(at);
        (len >= LONG.min(count)).then_some((base, len.min(count)))
    }

    /// The next of the bytes `at..at + count`, where they lie or packed.
    ///
    /// # Safety
    /// The block is readable and nothing writes it while the slice is used.
    pub(super) unsafe fn next<'a>(
        &self,
        at: usize,
        count: usize,
        packed: &'a mut Vec<u8>,
    ) -> &'a [u8] {
        if let Some((base, len)) = self.long_run(at, count) {
            // SAFETY: the run lies inside the block, which the caller guarantees.
            return unsafe { std::slice::from_raw_parts(base, len) };
        }
        let count = count.min(self.bytes() - at).min(PACKED);
        packed.clear();
        while packed.len() < count {
            let (base, len) = self.run(at + packed.len());
            let len = len.min(count - packed.len());
            // SAFETY: as above.
            packed.extend_from_slice(unsafe { std::slice::from_raw_parts(base, len) });
        }
        packed
    }

    /// Where the next of the bytes `at..at + count` go; nothing if they lie in short runs, which
    /// are written by `put`.
    ///
    /// # Safety
    /// The block is initialised, and nothing else touches it while the slice is used.
    pub(super) unsafe fn next_mut<'a>(&self, at: usize, count: usize) -> Option<&'a mut [u8]> {
        let (base, len) = self.long_run(at, count)?;
        // SAFETY: the run lies inside the block, which the caller guarantees.
        Some(unsafe { std::slice::from_raw_parts_mut(base, len) })
    }

    /// Writes bytes from byte `at` on.
    ///
    /// # Safety
    /// The block may be written, and nothing else touches it.
    pub(super) unsafe fn put(&self, mut at: usize, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (base, len) = self.run(at);
            let (now, rest) = bytes.split_at(len.min(bytes.len()));
            // SAFETY: the run lies inside the block, which the caller guarantees.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), base, now.len()) };
            at += now.len();
            bytes = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two groups of two rows of three bytes: 1-3, 5-7, 13-15, 17-19 of twenty.
    #[test]
    fn bytes_are_taken_row_by_row() {
        let mut memory: Vec<u8> = (0..20).collect();
        let base = memory.as_mut_ptr().wrapping_add(1);
        let place = Place { base, outer: 12, row: 4, foreign: false };
        let region = Region::new(place, [2, 2, 3]);
        let bytes = |at, count| {
            let mut packed = Vec::new();
            // SAFETY: the rows lie in the memory, which nobody writes meanwhile.
            unsafe { region.next(at, count, &mut packed) }.to_vec()
        };
        assert_eq!(bytes(0, 99), [1, 2, 3, 5, 6, 7, 13, 14, 15, 17, 18, 19]);
        assert_eq!((bytes(2, 5), bytes(10, 9)), (vec![3, 5, 6, 7, 13], vec![18, 19]));
        // SAFETY: as above.
        unsafe { region.put(5, &[70, 130]) };
        assert_eq!((memory[7], memory[13]), (70, 130));
    }

    /// Three cells of four bytes in two rows, of which 3, 0, 1 and 4 bytes count.
    #[test]
    fn only_the_front_of_cells_counts() {
        let mut memory: Vec<u8> = (0..24).collect();
        let (base, ends) = (memory.as_mut_ptr(), [3, 3, 4, 8]);
        let place = Place { base, outer: 0, row: 12, foreign: false };
        let cut = Some(Cut { ends: ends.as_ptr(), cells: 4, cell: 4 });
        let region = Region { place, shape: [1, 2, 8], cut };
        let mut packed = Vec::new();
        // SAFETY: the cells lie in the memory, which nobody else touches.
        let seen = unsafe { region.next(0, 99, &mut packed) }.to_vec();
        assert_eq!((region.bytes(), seen), (8, vec![0, 1, 2, 12, 16, 17, 18, 19]));
        // SAFETY: as above.
        unsafe { region.put(2, &[70, 71, 72]) };
        assert_eq!((memory[2], memory[12], memory[16], memory[3]), (70, 71, 72, 3));
    }

    /// Long rows go from where they lie, one at a time; what is left of one may be short.
    #[test]
    fn long_rows_are_not_packed() {
        let mut memory = vec![0; 4 * LONG];
        let place = Place { base: memory.as_mut_ptr(), outer: 0, row: 2 * LONG, foreign: false };
        let region = Region::new(place, [1, 2, LONG]);
        let mut packed = Vec::new();
        // SAFETY: the rows lie in the memory, which nobody else touches.
        let (first, rest) = unsafe {
            (region.next(0, 2 * LONG, &mut packed).len(), region.next_mut(9, 2 * LONG).is_none())
        };
        assert_eq!((first, rest, packed.len()), (LONG, true, 0));
    }
}
