//! Copies between the GPU's memory and the host's, on streams of their own: they run beside what is computed.
//!
//! A copy waits for all that was issued before it, which is more than it needs. What comes later waits
//! for it if its call says so.

use std::sync::Arc;

use phalanx_call::Tier;
use phalanx_engine::{Args, EngineError, Event};

use super::compile::What;
use super::{CudaEngine, CudaKernel};
use crate::device::{Device, Mark, Stream};
use crate::error::CudaError;

/// Both ways of copies.
pub(super) struct Copies {
    device: Arc<Device>,
    up: Stream,
    down: Stream,
    /// Where the engine's stream is when a copy is issued.
    issued: Mark,
    /// Copies that the engine's stream has not waited for, and their ends.
    open: Vec<(Event, Mark)>,
    /// Marks that are free again.
    free: Vec<Mark>,
}

impl Copies {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            up: Stream::new(device)?,
            down: Stream::new(device)?,
            issued: Mark::new(device)?,
            open: Vec::new(),
            free: Vec::new(),
            device: device.clone(),
        })
    }

    /// Lets what is issued on the engine's stream from now on wait for a copy, if the event is one.
    pub(super) fn come_before(&mut self, event: Event, engine: &Stream) -> Result<(), CudaError> {
        let Some(at) = self.open.iter().position(|(of, _)| *of == event) else { return Ok(()) };
        let (_, end) = self.open.swap_remove(at);
        let held = end.hold(engine);
        self.free.push(end);
        held
    }

    /// The same for all copies.
    pub(super) fn join(&mut self, engine: &Stream) -> Result<(), CudaError> {
        for (_, end) in self.open.drain(..) {
            end.hold(engine)?;
            self.free.push(end);
        }
        Ok(())
    }
}

impl CudaEngine {
    /// Whether a call is a copy between memories that the GPU can address.
    pub(super) fn copies_beside(&self, kernel: &CudaKernel, args: &Args<'_>) -> bool {
        let disk = |tier: Tier| tier == Tier::Disk;
        matches!(kernel.what, What::Copy)
            && !disk(args.inputs[0].tier)
            && !disk(args.outputs[0].span.tier)
    }

    /// Issues such a copy beside the engine's stream.
    pub(super) fn copy_beside(
        &mut self,
        event: Event,
        args: &Args<'_>,
        label: &str,
    ) -> Result<(), EngineError> {
        let (from, into) = (args.inputs[0], args.outputs[0].span);
        let copies = &mut self.copies;
        let end = match copies.free.pop() {
            Some(mark) => mark,
            None => Mark::new(&copies.device)?,
        };
        let stream = if into.tier == Tier::Device { &copies.up } else { &copies.down };
        copies.issued.record(&self.stream)?;
        copies.issued.hold(stream)?;
        let begun = self.timing.mark(event, stream)?;
        // SAFETY: both places are this call's to use between what it waits for and what waits for it.
        unsafe { self.arenas.copy(stream, from, into, label)? };
        self.timing.keep(event, begun, stream)?;
        end.record(stream)?;
        copies.open.push((event, end));
        Ok(())
    }
}
