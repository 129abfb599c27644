//! The engine that the command and the library train with on this machine.

use phalanx_cpu::CpuEngine;

use crate::error::Result;

/// The engine of this machine.
pub type HostEngine = CpuEngine;

/// An engine with this many threads.
pub fn host_engine(threads: usize) -> Result<HostEngine> {
    Ok(CpuEngine::new(threads)?)
}
