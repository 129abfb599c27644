//! A second queue for products that nothing of a backward waits for: gradients of weights.
//!
//! In a backward, the gradient of a layer's input goes on to the layer before it; that of its weights is only read
//! when all of them are summed. So while a step is captured, products of phase W are issued on a queue of their own.
//! Each waits for everything that was issued before it. What is issued later waits for it only if one of both writes
//! memory that the other touches, which is found from the slots of the program: whatever the planner put where, the
//! order of two uses of a byte stays. The graph then has a branch beside the chain of gradients, on which small kernels
//! (norms, rotary, SwiGLU) leave a GPU half idle. Every product is the same call, so the bits are those of one queue.
//!
//! It costs a second workspace for the library of products. A failure in a product on this queue may be blamed on a
//! later call.

use std::collections::VecDeque;
use std::sync::Arc;

use phalanx_engine::{Args, EngineError};

use super::touched::TouchedBytes;
use super::{CudaEngine, CudaKernel};
use crate::device::{Device, DeviceMemory, Mark, Stream};
use crate::error::CudaError;
use crate::tasks::Task;

/// The queue, and what of it the engine's queue has not waited for.
pub(super) struct Beside {
    device: Arc<Device>,
    pub(super) stream: Stream,
    pub(super) workspace: DeviceMemory,
    /// Where the engine's queue is when something is issued here.
    issued: Mark,
    open: Open<Mark>,
    free: Vec<Mark>,
    /// Whether a step is being captured.
    captures: bool,
}

/// Whether the second queue is asked for.
pub(crate) fn is_asked_for() -> bool {
    std::env::var_os("PHALANX_QUEUES").is_some_and(|value| value == "2")
}

impl Beside {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            device: device.clone(),
            stream: Stream::new(device)?,
            workspace: DeviceMemory::new(device, crate::products::WORKSPACE)?,
            issued: Mark::new(device)?,
            open: Open::default(),
            free: Vec::new(),
            captures: false,
        })
    }

    /// Lets the engine's queue wait for what something that is issued there next must come after.
    fn come_before(&mut self, touched: &TouchedBytes, engine: &Stream) -> Result<(), CudaError> {
        let Some(last) = self.open.last_in_the_way(touched) else { return Ok(()) };
        self.hold(last, engine)
    }

    /// The same for all that is open.
    fn join(&mut self, engine: &Stream) -> Result<(), CudaError> {
        match self.open.0.len().checked_sub(1) {
            Some(last) => self.hold(last, engine),
            None => Ok(()),
        }
    }

    /// Products of this queue run one after the other: who waits for one has waited for those before it.
    fn hold(&mut self, last: usize, engine: &Stream) -> Result<(), CudaError> {
        let held = self.open.0[last].1.hold(engine);
        self.free.extend(self.open.0.drain(..=last).map(|(_, end)| end));
        held
    }
}

/// What was issued beside and not waited for, in its order: the memory that it touches, and its end.
struct Open<End>(VecDeque<(TouchedBytes, End)>);

impl<End> Default for Open<End> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<End> Open<End> {
    fn last_in_the_way(&self, touched: &TouchedBytes) -> Option<usize> {
        self.0.iter().rposition(|(open, _)| open.conflicts(touched))
    }
}

impl CudaEngine {
    /// Issues what is captured on both queues, if there is a second one, and joins them at the end.
    pub(super) fn with_both_queues(
        &mut self,
        issue: impl FnOnce(&mut Self) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        self.capture_beside(true);
        let issued = issue(self);
        self.capture_beside(false);
        issued.and(self.join_beside())
    }

    fn capture_beside(&mut self, captures: bool) {
        self.beside.iter_mut().for_each(|beside| beside.captures = captures);
    }

    /// Lets the engine's queue wait for all that was issued beside it.
    pub(super) fn join_beside(&mut self) -> Result<(), EngineError> {
        let Some(beside) = &mut self.beside else { return Ok(()) };
        Ok(beside.join(&self.stream)?)
    }

    /// Issues a task of an instruction, on the second queue if it may go there.
    pub(super) fn issue_ordered(
        &mut self,
        kernel: &CudaKernel,
        (instr, task): (usize, &Task),
        args: &Args<'_>,
    ) -> Result<(), EngineError> {
        let touched = kernel.touched.get(instr);
        let (Some(beside), Some(touched)) = (&mut self.beside, touched) else {
            return self.task(task, args, &kernel.name);
        };
        if !beside.captures {
            return self.task(task, args, &kernel.name);
        }
        let bytes = touched.bytes(args);
        if !touched.is_deferrable || !matches!(task, Task::Kernel(_) | Task::Product(_)) {
            beside.come_before(&bytes, &self.stream)?;
            return self.task(task, args, &kernel.name);
        }
        beside.issued.record(&self.stream)?;
        beside.issued.hold(&beside.stream)?;
        self.is_beside = true;
        let done = self.task(task, args, &kernel.name);
        self.is_beside = false;
        done?;
        let Some(beside) = &mut self.beside else { return Ok(()) };
        let end = match beside.free.pop() {
            Some(mark) => mark,
            None => Mark::new(&beside.device)?,
        };
        end.record(&beside.stream)?;
        beside.open.0.push_back((bytes, end));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(reads: &[[usize; 2]], writes: &[[usize; 2]]) -> TouchedBytes {
        TouchedBytes { reads: reads.to_vec(), writes: writes.to_vec() }
    }

    #[test]
    fn only_uses_of_the_same_byte_are_ordered() {
        let products = [
            (touched(&[[0, 64], [64, 128]], &[[1000, 1100]]), 1),
            (touched(&[[64, 128], [128, 192]], &[[1100, 1200]]), 2),
        ];
        let open = Open(products.into());
        let found = |reads: &[[usize; 2]], writes: &[[usize; 2]]| {
            open.last_in_the_way(&touched(reads, writes))
        };
        // Both only read; neighbours; another piece.
        assert_eq!(found(&[[0, 192]], &[[192, 256], [1200, 1264]]), None);
        // What it reads is overwritten; what it writes is read, or written.
        assert_eq!(found(&[], &[[60, 61]]), Some(0));
        assert_eq!(found(&[], &[[100, 164]]), Some(1));
        assert_eq!(found(&[[1099, 1100]], &[]), Some(0));
        assert_eq!(found(&[], &[[1000, 1101]]), Some(1));
    }
}
