//! What the engine counts.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use phalanx_call::traffic::add;
use phalanx_call::{Moved, Route};
use phalanx_comm::OpKind;
use phalanx_engine::Counters;

use super::CpuEngine;

impl Counters for CpuEngine {
    fn moved(&mut self) -> BTreeMap<Route, Moved> {
        let mut total = BTreeMap::new();
        let Some(line) = &mut self.comm else { return total };
        let line = line.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (tag, kind, count) in line.comm.traffic().entries() {
            // The sender makes the call, and the receiver moves the bytes.
            let (op, calls) = match kind {
                OpKind::Receive => (OpKind::Send.name(), 0),
                _ => (kind.name(), count.calls),
            };
            let route = Route { op, axes: line.counted[tag as usize].clone() };
            add(&mut total, route, Moved { calls, bytes: count.bytes });
        }
        total
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
