//! The bytes of a strided block, in the order in which they go over a stream.

use std::io::{IoSlice, IoSliceMut};

use crate::kernel::Place;

/// The most rows in one system call.
const ROWS: usize = 64;

/// A block of memory that is sent from or received into.
#[derive(Clone, Copy)]
pub(super) struct Region {
    pub(super) place: Place,
    /// `outer`, `rows` and bytes of a row.
    pub(super) shape: [usize; 3],
}

impl Region {
    pub(super) fn new(place: Place, shape: [usize; 3]) -> Self {
        let dense = place.is_dense(shape);
        let shape = if dense { [1, 1, shape.iter().product()] } else { shape };
        Self { place, shape }
    }

    /// Contiguous bytes.
    pub(super) fn flat(base: *mut u8, bytes: usize) -> Self {
        Self { place: Place { base, outer: 0, row: 0, foreign: false }, shape: [1, 1, bytes] }
    }

    /// How many bytes there are.
    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product()
    }

    /// The contiguous run that begins at byte `at`, and its length.
    fn run(&self, at: usize) -> (*mut u8, usize) {
        let [_, rows, len] = self.shape;
        let (row, column) = (at / len, at % len);
        (self.place.at(row / rows, row % rows).wrapping_add(column), len - column)
    }

    /// The runs of the bytes `at..at + count`, as many as one system call takes.
    fn runs(&self, at: usize, count: usize) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let end = at + count.min(self.bytes() - at);
        let mut at = at;
        std::iter::from_fn(move || {
            let (base, len) = (at < end).then(|| self.run(at))?;
            let len = len.min(end - at);
            at += len;
            Some((base, len))
        })
        .take(ROWS)
    }

    /// Adds the bytes `at..at + count` to what is written next.
    ///
    /// # Safety
    /// The block is readable and nothing writes it while the slices are used.
    pub(super) unsafe fn gather<'a>(&self, at: usize, count: usize, slices: &mut Vec<IoSlice<'a>>) {
        for (base, len) in self.runs(at, count) {
            // SAFETY: the run lies inside the block, which the caller guarantees.
            slices.push(IoSlice::new(unsafe { std::slice::from_raw_parts(base, len) }));
        }
    }

    /// All bytes, followed by this many zeros.
    ///
    /// # Safety
    /// The block is readable and nothing writes it.
    pub(super) unsafe fn copied(&self, zeros: usize) -> Vec<u8> {
        let (bytes, mut copy) = (self.bytes(), Vec::new());
        copy.reserve_exact(bytes + zeros);
        while copy.len() < bytes {
            let (base, len) = self.run(copy.len());
            // SAFETY: the run lies inside the block, which the caller guarantees.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(base, len) });
        }
        copy.resize(bytes + zeros, 0);
        copy
    }

    /// Adds the places of the bytes `at..at + count` to what is read into next.
    ///
    /// # Safety
    /// The block is initialised, and nothing else touches it while the slices are used.
    pub(super) unsafe fn scatter<'a>(
        &self,
        at: usize,
        count: usize,
        slices: &mut Vec<IoSliceMut<'a>>,
    ) {
        for (base, len) in self.runs(at, count) {
            // SAFETY: runs lie inside the block, which the caller guarantees, and do not overlap.
            slices.push(IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(base, len) }));
        }
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
            let mut slices = Vec::new();
            // SAFETY: the rows lie in the memory, which nobody writes meanwhile.
            unsafe { region.gather(at, count, &mut slices) };
            slices.iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>()
        };
        assert_eq!(bytes(0, 99), [1, 2, 3, 5, 6, 7, 13, 14, 15, 17, 18, 19]);
        assert_eq!((bytes(2, 5), bytes(12, 1)), (vec![3, 5, 6, 7, 13], vec![]));
        // SAFETY: as above.
        let copied = unsafe { region.copied(2) };
        assert_eq!(copied, [1, 2, 3, 5, 6, 7, 13, 14, 15, 17, 18, 19, 0, 0]);
        // SAFETY: as above.
        unsafe { region.put(5, &[70, 130]) };
        assert_eq!((memory[7], memory[13]), (70, 130));
    }
}
