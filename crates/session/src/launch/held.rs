//! Memory of ranks that a launcher or an agent holds, so that it outlives their processes.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;

use phalanx_comm::FlightRecorder;
use phalanx_recovery::StartPoint;

use super::children::Children;

/// The memory in which the ranks of an epoch keep their state, by rank. On one host that of the first rank is the memory
/// of all; on several, each rank has its own.
#[derive(Default)]
pub(crate) struct HeldMemory(BTreeMap<usize, File>);

impl HeldMemory {
    /// What a new epoch takes over: everything, or nothing if it does not begin with what lies in memory. What is taken over
    /// is held on, because the new processes may be lost before they have changed it.
    pub(crate) fn begin(&mut self, from: StartPoint) {
        if !matches!(from, StartPoint::Memory(_)) {
            self.0.clear();
        }
    }

    /// Opens the memory of ranks that have said where it is, while their processes are there.
    pub(crate) fn look(
        &mut self,
        ranks: Range<usize>,
        children: &Children,
        words: &FlightRecorder,
    ) {
        if words.job().is_over() {
            self.0.clear();
            return;
        }
        for rank in ranks {
            let (Some(fd), false) = (words.rank(rank).memory(), self.holds(rank)) else { continue };
            let path = children.running(rank).map(|process| format!("/proc/{process}/fd/{fd}"));
            let file = path.and_then(|path| File::options().read(true).write(true).open(path).ok());
            self.0.extend(file.map(|file| (rank, file)));
        }
    }

    /// Whether the memory of a rank is held.
    pub(crate) fn holds(&self, rank: usize) -> bool {
        self.0.contains_key(&rank)
    }

    /// The memory of a rank, if it is held.
    pub(crate) fn of(&self, rank: usize) -> Option<&File> {
        self.0.get(&rank)
    }
}
