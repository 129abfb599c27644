//! The engine that the command and the library train with on this machine.

use phalanx_comm::Endpoint;
use phalanx_cpu::CpuEngine;

use crate::error::Result;

/// The engine of this machine.
pub type HostEngine = CpuEngine;

/// An engine with this many threads.
pub fn host_engine(threads: usize) -> Result<HostEngine> {
    Ok(CpuEngine::new(threads)?)
}

/// One rank's engine, with its endpoint to the others.
pub fn rank_engine(threads: usize, endpoint: Endpoint) -> Result<HostEngine> {
    Ok(CpuEngine::on_rank(threads, Box::new(endpoint))?)
}
