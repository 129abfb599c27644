//! Which parts of a rank's shared memory are taken: arenas from the end, staged calls from the
//! beginning.

use std::ops::Range;

/// Parts begin at multiples of this: two cache lines.
const STEP: usize = 128;

/// The free parts of a room, in order, never adjacent.
#[derive(Debug, Default)]
pub(super) struct Room {
    free: Vec<Range<usize>>,
}

impl Room {
    /// A room of this many bytes, all free.
    pub(super) fn new(bytes: usize) -> Self {
        let mut room = Self { free: Vec::with_capacity(16) };
        room.give(0..bytes / STEP * STEP);
        room
    }

    /// The largest free part, in bytes.
    pub(super) fn largest(&self) -> usize {
        self.free.iter().map(ExactSizeIterator::len).max().unwrap_or(0)
    }

    /// Takes a part near the beginning.
    pub(super) fn take_first(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = bytes.checked_next_multiple_of(STEP)?;
        let at = self.free.iter().position(|free| free.len() >= bytes)?;
        let start = self.free[at].start;
        self.free[at].start += bytes;
        self.forget_empty(at);
        Some(start..start + bytes)
    }

    /// Takes a part near the end, which begins at a multiple of `align`.
    pub(super) fn take_last(&mut self, bytes: usize, align: usize) -> Option<Range<usize>> {
        let bytes = bytes.checked_next_multiple_of(STEP)?;
        let start = |free: &Range<usize>| {
            let start = free.end.checked_sub(bytes)? / align * align;
            (start >= free.start).then_some(start)
        };
        let at = self.free.iter().rposition(|free| start(free).is_some())?;
        let start = start(&self.free[at])?;
        let end = std::mem::replace(&mut self.free[at].end, start);
        self.forget_empty(at);
        self.give(start + bytes..end);
        Some(start..start + bytes)
    }

    /// Takes a part back.
    pub(super) fn give(&mut self, part: Range<usize>) {
        if part.is_empty() {
            return;
        }
        let at = self.free.partition_point(|free| free.start < part.start);
        self.free.insert(at, part);
        for first in [at, at.wrapping_sub(1)] {
            if let Some([one, next]) = self.free.get(first..).and_then(|rest| rest.get(..2))
                && one.end == next.start
            {
                self.free[first].end = next.end;
                self.free.remove(first + 1);
            }
        }
    }

    fn forget_empty(&mut self, at: usize) {
        if self.free[at].is_empty() {
            self.free.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_come_back_whole() {
        let mut room = Room::new(1 << 20);
        let (mut taken, mut seed) = (Vec::<Range<usize>>::new(), 1u64);
        for round in 0..2000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            let (dice, bytes) = ((seed >> 60) as usize, (seed >> 40) as usize % 50_000);
            let part = match dice {
                0..6 => room.take_first(bytes),
                6..9 => room.take_last(bytes, 4096),
                _ if taken.is_empty() => None,
                _ => {
                    room.give(taken.swap_remove(dice % taken.len()));
                    None
                }
            };
            if let Some(part) = part {
                let apart =
                    |other: &Range<usize>| other.end <= part.start || part.end <= other.start;
                assert!(part.len() >= bytes && part.end <= 1 << 20, "round {round}: {part:?}");
                assert!(taken.iter().filter(|other| !other.is_empty()).all(apart), "round {round}");
                taken.push(part);
            }
        }
        taken.into_iter().for_each(|part| room.give(part));
        assert_eq!((room.free.len(), room.largest()), (1, 1 << 20));
    }

    #[test]
    fn arenas_are_aligned_and_what_does_not_fit_is_refused() {
        let mut room = Room::new(10_000);
        assert_eq!(room.take_last(1, 4096), Some(8192..8320));
        assert_eq!(room.take_first(100), Some(0..128));
        assert_eq!((room.take_first(9000), room.largest()), (None, 8064));
        assert_eq!(room.take_last(usize::MAX, 4096), None);
    }
}
