//! The engine that the command and the library train with on this machine.

use crate::error::Result;

/// The engine of this machine.
pub type HostEngine = phalanx_reference::ReferenceEngine;

/// An engine with this many threads.
pub fn host_engine(_threads: usize) -> Result<HostEngine> {
    Ok(HostEngine::new())
}
