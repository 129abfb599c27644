//! The arenas of an engine: the GPU's memory, and the host's beside it.

use std::sync::Arc;

use phalanx_call::Tier;
use phalanx_engine::{EngineError, Span};

use crate::device::{Device, DeviceMemory, PinnedMemory, Stream};
use crate::libraries::Address;

/// One arena in each tier.
#[derive(Default)]
pub(super) struct Arenas {
    device: Option<DeviceMemory>,
    host: Option<PinnedMemory>,
}

impl Arenas {
    /// Allocates an arena, zeroed.
    pub(super) fn reserve(
        &mut self,
        device: &Arc<Device>,
        stream: &Stream,
        tier: Tier,
        bytes: usize,
    ) -> Result<(), EngineError> {
        let fail = |error: crate::error::CudaError| {
            let free = device.memory().map_or(String::new(), |(free, total)| {
                format!("; {free} of {total} bytes of {} are free", device.name())
            });
            EngineError::Memory { bytes, why: format!("{error}{free}") }
        };
        match tier {
            Tier::Device => {
                // The old one first, so that both need not fit.
                self.device = None;
                let arena = DeviceMemory::new(device, bytes).map_err(fail)?;
                // SAFETY: the arena is new, so nothing else uses it.
                unsafe { stream.set(arena.address(), 0, bytes) }.map_err(fail)?;
                stream.wait().map_err(fail)?;
                self.device = Some(arena);
            }
            Tier::Host => self.host = Some(PinnedMemory::new(device, bytes).map_err(fail)?),
            // It has no memory of its own: what is copied there goes to a store.
            Tier::Disk => {}
        }
        Ok(())
    }

    /// The first address of the GPU's arena.
    pub(super) fn base(&self) -> Address {
        self.device.as_ref().map_or(0, DeviceMemory::address)
    }

    /// The address of a piece of an arena: of the GPU, or of the host.
    pub(super) fn address(&self, span: Span) -> Result<Address, EngineError> {
        let (base, bytes) = match span.tier {
            Tier::Device => (self.base(), self.device.as_ref().map_or(0, DeviceMemory::bytes)),
            Tier::Host => {
                let host = self.host.as_ref();
                (host.map_or(0, |m| m.as_ptr() as Address), host.map_or(0, PinnedMemory::bytes))
            }
            Tier::Disk => (0, 0),
        };
        if span.end() > bytes {
            return Err(EngineError::Failed {
                program: "arena".to_owned(),
                why: format!(
                    "bytes {} to {} are not in the {} arena of {bytes} bytes; reserve it first",
                    span.offset,
                    span.end(),
                    span.tier
                ),
            });
        }
        Ok(base + span.offset as Address)
    }

    pub(super) fn write(
        &self,
        stream: &Stream,
        into: Span,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        into.holds(bytes.len())?;
        let to = self.address(into)?;
        match into.tier {
            // SAFETY: the caller has waited for what uses the place, which lies in the arena.
            Tier::Device => unsafe { stream.upload(to, bytes)? },
            // SAFETY: as above, in the host's memory.
            _ => unsafe { (to as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) },
        }
        Ok(())
    }

    /// Copies a piece of an arena to another place, in the order of a stream.
    ///
    /// # Safety
    /// Both places are this call's to use, in the order of the stream.
    pub(super) unsafe fn copy(
        &self,
        stream: &Stream,
        from: Span,
        into: Span,
        label: &str,
    ) -> Result<(), EngineError> {
        into.holds(from.bytes)?;
        let (at, to) = (self.address(from)?, self.address(into)?);
        // SAFETY: the caller's; both lie in arenas, which the GPU can address.
        unsafe { stream.copy(at, to, from.bytes) }.map_err(|error| error.during(label))
    }

    pub(super) fn clear(&self, stream: &Stream, span: Span) -> Result<(), EngineError> {
        let to = self.address(span)?;
        match span.tier {
            // SAFETY: the caller has waited for what uses the place, which lies in the arena.
            Tier::Device => unsafe { stream.set(to, 0, span.bytes)? },
            // SAFETY: as above, in the host's memory.
            _ => unsafe { (to as *mut u8).write_bytes(0, span.bytes) },
        }
        Ok(())
    }

    pub(super) fn read(
        &self,
        stream: &Stream,
        from: Span,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        from.holds(out.len())?;
        let at = self.address(from)?;
        match from.tier {
            // SAFETY: the caller has waited for what writes the place, which lies in the arena.
            Tier::Device => unsafe { stream.download(at, out)? },
            // SAFETY: as above, in the host's memory.
            _ => unsafe { out.as_mut_ptr().copy_from(at as *const u8, out.len()) },
        }
        Ok(())
    }
}
