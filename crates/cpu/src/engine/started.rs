//! Collectives and messages that were launched on their own lanes and have not ended.

use std::sync::{Arc, PoisonError};

use phalanx_comm::Handle;
use phalanx_engine::{Args, EngineError, Event};

use super::{CpuEngine, Kernel};
use crate::tasks::{Context, Share, Transfer};

/// A collective that was launched and has not ended.
pub(super) struct Started {
    event: Event,
    handle: Handle,
    program: Arc<str>,
}

impl CpuEngine {
    /// Starts a kernel that is a single collective; its event ends with it.
    pub(super) fn start(
        &mut self,
        kernel: &Kernel,
        transfer: &Transfer,
        args: &Args<'_>,
    ) -> Result<(), EngineError> {
        let cx = Context {
            share: Share { worker: 0, workers: 1 },
            bases: self.arenas.bases(),
            args: *args,
            scratch: std::ptr::null_mut(),
            scratch_bytes: 0,
            failure: &self.failure,
            comm: None,
            handles: &kernel.handles,
        };
        let Some(comm) = &self.comm else { return Ok(()) };
        let mut comm = comm.lock().unwrap_or_else(PoisonError::into_inner);
        let (event, program) = (Event(self.events), &kernel.name);
        // SAFETY: the caller waits for its event before anything else uses its operands; the arenas
        // outlive the endpoint.
        let started = unsafe {
            transfer.start(&cx, comm.comm.as_mut(), |handle| {
                self.started.push(Started { event, handle, program: program.clone() });
            })
        };
        started
            .and_then(|()| comm.comm.computes())
            .map_err(|e| EngineError::Failed { program: program.to_string(), why: e.to_string() })
    }

    /// Starts a copy to the disk; its event ends with it.
    pub(super) fn save(&mut self, event: Event, args: &Args<'_>) -> Result<(), EngineError> {
        let (from, into) = (args.inputs[0], args.outputs[0].span);
        let from_at = self.arenas.address(from)?;
        // SAFETY: the caller waits for its event before anything writes the operand, and the arenas
        // outlive the thread that reads them.
        unsafe { self.disk.start(event, from_at, from.bytes, into.offset) }
    }

    /// Waits for the collective of an event: for all its calls that are still running; or for the
    /// copy to the disk.
    pub(super) fn finish(&mut self, event: Event) -> Result<(), EngineError> {
        self.disk.finish(event)?;
        while let Some(at) = self.started.iter().position(|s| s.event == event) {
            let Started { handle, program, .. } = self.started.swap_remove(at);
            if let Some(comm) = self.communicator() {
                comm.wait(handle).map_err(|e| EngineError::Failed {
                    program: program.to_string(),
                    why: e.to_string(),
                })?;
            }
        }
        self.stamps.end(event);
        Ok(())
    }

    /// While calls are timed: records which started calls have ended.
    pub(super) fn look(&mut self) -> Result<(), EngineError> {
        if !self.stamps.is_on() {
            return Ok(());
        }
        for at in 0..self.started.len() {
            let event = self.started[at].event;
            if self.has_ended(event)? {
                self.stamps.end(event);
            }
        }
        for &event in self.disk.outstanding() {
            if self.disk.has_ended(event) {
                self.stamps.end(event);
            }
        }
        Ok(())
    }

    /// Whether all calls of the collective of an event have ended. Other calls run when they are
    /// issued, so they have ended.
    pub(super) fn has_ended(&mut self, event: Event) -> Result<bool, EngineError> {
        if !self.disk.has_ended(event) {
            return Ok(false);
        }
        let Some(line) = &mut self.comm else { return Ok(true) };
        let comm = &mut line.get_mut().unwrap_or_else(PoisonError::into_inner).comm;
        for Started { handle, program, .. } in self.started.iter().filter(|s| s.event == event) {
            let over = comm.test(handle).map_err(|e| EngineError::Failed {
                program: program.to_string(),
                why: e.to_string(),
            })?;
            if !over {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
