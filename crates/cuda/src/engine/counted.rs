//! What the engine counts.

use std::collections::BTreeMap;
use std::time::Duration;

use phalanx_call::{Moved, Route};
use phalanx_comm::CountedEndpoint;
use phalanx_engine::Counters;

use super::CudaEngine;

impl Counters for CudaEngine {
    fn moved(&mut self) -> BTreeMap<Route, Moved> {
        self.endpoint.as_ref().map(CountedEndpoint::moved).unwrap_or_default()
    }

    /// The host issues transfers, and does not know the counts of a step.
    fn moves_rows(&self) -> bool {
        false
    }

    /// Not measured: products run while the host issues what follows.
    fn products(&mut self) -> Duration {
        Duration::ZERO
    }

    /// The workspaces of products, tables that kernels read, and batches that came ahead.
    fn scratch_bytes(&mut self) -> usize {
        let tables: usize = self.constants.values().map(|memory| memory.bytes()).sum();
        let beside = self.beside.as_ref().map_or(0, |beside| beside.workspace.bytes());
        self.workspace.bytes() + beside + tables + self.ahead.bytes()
    }

    fn busy(&mut self) -> Option<Duration> {
        self.communicator().map(|comm| comm.busy().busy)
    }
}
