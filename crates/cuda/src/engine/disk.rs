//! Copies between tiers: the host's memory, and the store that the tier `Disk` is.

use phalanx_call::Tier;
use phalanx_engine::{Args, EngineError};

use super::CudaEngine;

impl CudaEngine {
    /// Copies the one input to the one output.
    pub(super) fn copy_between(&mut self, args: &Args<'_>, label: &str) -> Result<(), EngineError> {
        let failed = |why: String| EngineError::Failed { program: label.to_owned(), why };
        let (from, into) = (args.inputs[0], args.outputs[0].span);
        match (from.tier, into.tier) {
            (Tier::Disk, _) => Err(failed("nothing is read back from a disk".to_owned())),
            (_, Tier::Disk) => {
                let store = self.disk.clone();
                let store = store.ok_or_else(|| failed("no store is mounted".to_owned()))?;
                let mut bytes = vec![0; from.bytes];
                self.arenas.read(&self.stream, from, &mut bytes)?;
                store.write(into.offset, &bytes).map_err(|why| EngineError::Disk { why })
            }
            // SAFETY: both places are this call's to use in the order of the stream.
            _ => unsafe { self.arenas.copy(&self.stream, from, into, label) },
        }
    }
}
