//! Counters of what a rank reads from other ranks and writes to them.
//!
//! They count where bytes really move: where another rank's memory is touched (`kernel`), or a
//! stream is read or written. They never use the formulas of `volume`, so that the two can be
//! compared.

use crate::call::OpKind;

/// Tags are indices of a table: at most this many.
pub(crate) const TAGS: u32 = 1 << 16;

/// Calls of one kind under one tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCount {
    /// Calls that moved their data.
    pub calls: u64,
    /// Bytes that this rank read from others, or wrote to them. Each byte is counted on one side
    /// only.
    pub bytes: u64,
}

/// All counters of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    tags: Vec<[TrafficCount; OpKind::ALL.len()]>,
}

impl Traffic {
    /// The counter of a kind under a tag.
    pub fn get(&self, tag: u32, kind: OpKind) -> TrafficCount {
        self.tags.get(tag as usize).map_or_else(TrafficCount::default, |row| row[kind as usize])
    }

    /// Every counter that is not zero, by tag, then by kind.
    pub fn entries(&self) -> impl Iterator<Item = (u32, OpKind, TrafficCount)> + '_ {
        let rows = self.tags.iter().enumerate();
        rows.flat_map(|(tag, row)| {
            OpKind::ALL.iter().map(move |&kind| (tag as u32, kind, row[kind as usize]))
        })
        .filter(|(_, _, count)| *count != TrafficCount::default())
    }

    /// Bytes of everything.
    pub fn total_bytes(&self) -> u64 {
        self.entries().map(|(_, _, count)| count.bytes).sum()
    }

    /// Counts a call that has moved its data, for transports elsewhere.
    pub fn count(&mut self, tag: u32, kind: OpKind, bytes: u64) {
        self.reserve(tag);
        self.add(tag, kind, 1, bytes);
    }

    /// Takes all counters of a kind over from others.
    pub fn copy_kind(&mut self, others: &Traffic, kind: OpKind) {
        self.reserve((others.tags.len() as u32).saturating_sub(1));
        for (own, other) in self.tags.iter_mut().zip(&others.tags) {
            own[kind as usize] = other[kind as usize];
        }
    }

    /// Makes room for a tag, so that counting under it never allocates.
    pub(crate) fn reserve(&mut self, tag: u32) {
        if self.tags.len() <= tag as usize {
            self.tags.resize(tag as usize + 1, Default::default());
        }
    }

    pub(crate) fn add(&mut self, tag: u32, kind: OpKind, calls: u64, bytes: u64) {
        let count = &mut self.tags[tag as usize][kind as usize];
        count.calls += calls;
        count.bytes += bytes;
    }

    pub(crate) fn clear(&mut self) {
        self.tags.fill(Default::default());
    }
}
