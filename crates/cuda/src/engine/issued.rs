//! Which call a GPU was at when it failed.
//!
//! A GPU runs behind the host, and says only at the end that something went wrong. So after each call the
//! stream writes the call's number to memory of the host. What failed is the first call whose number is
//! missing.

use std::collections::VecDeque;
use std::sync::Arc;

use phalanx_engine::{EngineError, Event};

use crate::device::{Device, PinnedMemory, Stream};
use crate::error::CudaError;

/// Calls that were issued, and how far the GPU has come.
pub(super) struct Issued {
    /// The number of the last call that has ended.
    ended: PinnedMemory,
    calls: VecDeque<(u32, Arc<str>)>,
}

impl Issued {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self { ended: PinnedMemory::new(device, 64)?, calls: VecDeque::new() })
    }

    /// Notes a call behind what it has issued.
    pub(super) fn note(
        &mut self,
        stream: &Stream,
        event: Event,
        name: &Arc<str>,
    ) -> Result<(), CudaError> {
        let number = event.0 as u32;
        self.calls.push_back((number, name.clone()));
        // SAFETY: the memory holds the number, and nothing else is written there.
        unsafe { stream.write_number(self.ended.as_ptr() as u64, number) }
    }

    /// The calls that were noted and not forgotten: those of a step that was captured.
    pub(super) fn take(&mut self) -> Vec<(u32, Arc<str>)> {
        self.calls.drain(..).collect()
    }

    /// Notes calls that a graph issues again, before it does. Their numbers are those of earlier runs, so the
    /// last one of these is first replaced.
    pub(super) fn again(
        &mut self,
        stream: &Stream,
        calls: &[(u32, Arc<str>)],
    ) -> Result<(), CudaError> {
        let before = self.calls.back().map_or(0, |(number, _)| *number);
        self.calls.extend(calls.iter().cloned());
        // SAFETY: as in `note`.
        unsafe { stream.write_number(self.ended.as_ptr() as u64, before) }
    }

    /// Forgets calls that are known to have ended.
    pub(super) fn clear(&mut self) {
        self.calls.clear();
    }

    /// The error of the call that the GPU was at.
    pub(super) fn blame(&self, error: &CudaError) -> EngineError {
        // SAFETY: the memory holds a number, which the GPU has written or nobody has.
        let ended = unsafe { self.ended.as_ptr().cast::<u32>().read_volatile() };
        blame(&self.calls, ended, error)
    }
}

fn blame(calls: &VecDeque<(u32, Arc<str>)>, ended: u32, error: &CudaError) -> EngineError {
    let after = calls.iter().position(|(number, _)| *number == ended).map_or(0, |at| at + 1);
    let (program, place) = match calls.get(after) {
        Some((_, name)) => (name.to_string(), format!("call {} of {}", after + 1, calls.len())),
        None => ("GPU".to_owned(), "after the last call".to_owned()),
    };
    let why = format!("the GPU failed here ({place} that were issued): {error}");
    EngineError::Failed { program, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_call_that_has_not_ended_is_named() {
        let calls = [(7, "embed F"), (8, "block F"), (9, "head FB")];
        let calls: VecDeque<_> = calls.iter().map(|(n, name)| (*n, (*name).into())).collect();
        let error = CudaError::Call { function: "cuStreamSynchronize", why: "no".to_owned() };
        let named = |ended: u32| blame(&calls, ended, &error).to_string();
        // No call of a graph has a smaller number than 1.
        assert!(named(0).contains("`embed F`"), "{}", named(0));
        assert!(named(6).contains("`embed F`") && named(6).contains("call 1 of 3"), "{}", named(6));
        assert!(named(7).contains("`block F`") && named(7).contains("cuStream"), "{}", named(7));
        assert!(named(9).contains("after the last call"), "{}", named(9));
    }
}
