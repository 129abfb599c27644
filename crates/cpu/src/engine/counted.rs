//! What the engine counts.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use phalanx_call::{Moved, Route};
use phalanx_engine::Counters;

use super::CpuEngine;

impl Counters for CpuEngine {
    fn moved(&mut self) -> BTreeMap<Route, Moved> {
        let Some(line) = &mut self.comm else { return BTreeMap::new() };
        line.get_mut().unwrap_or_else(PoisonError::into_inner).moved()
    }

    /// Counted on the first thread.
    fn products(&mut self) -> Duration {
        Duration::from_nanos(self.failure.matmul_nanoseconds())
    }

    /// Over all threads.
    fn scratch_bytes(&mut self) -> usize {
        self.scratch_bytes * self.threads()
    }

    /// Known only if there are other ranks; for the thread that asks, which must be the rank's own.
    fn busy(&mut self) -> Option<Duration> {
        self.communicator().map(|comm| comm.busy().busy)
    }
}
