//! The engine that the command and the library train with on this machine.

use crate::bench::Product;
use crate::error::Result;

/// The engine of this machine.
pub type HostEngine = phalanx_reference::ReferenceEngine;

/// An engine with this many threads.
pub fn host_engine(_threads: usize) -> Result<HostEngine> {
    Ok(HostEngine::new())
}

/// Seconds that the engine has spent in matrix products so far, if it measures them.
pub(crate) fn product_seconds(_engine: &HostEngine) -> Option<f64> {
    None
}

/// Seconds that one product takes by itself, on all threads of the engine.
pub(crate) fn time_product(_engine: &mut HostEngine, _product: &Product) -> Option<f64> {
    None
}
