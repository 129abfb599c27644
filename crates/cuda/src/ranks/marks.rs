//! Marks in streams that other ranks wait for, and how other processes open them.
//!
//! Marks are never destroyed: another rank may wait for the last one of a rank that has already gone. They go
//! back to a list, and the next world of this process uses them again. Waiting for a mark that was used again
//! only waits longer than needed, and never forever: whatever is in a queue waits for what was queued before.

use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use crate::device::{Device, Stream};
use crate::error::CudaError;
use crate::libraries::{Handle, IpcHandle, driver_call};

/// The marks of one call: where its buffers are ready, and where this rank's part of it ends.
#[derive(Clone, Copy)]
pub(super) struct Marks {
    pub(super) begin: Mark,
    pub(super) end: Mark,
}

/// A place in a stream.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    event: Handle,
    /// What other processes open it by, if there are any.
    pub(super) ipc: Option<IpcHandle>,
}

// SAFETY: an event is a handle that any thread may use, and is never destroyed.
unsafe impl Send for Mark {}

/// Marks that no rank of this process uses now: those that other processes can open, and others.
static FREE: [Mutex<Vec<Marks>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

/// Of `cuEventCreate`: no time is taken; other processes can open it.
const NO_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

impl Marks {
    /// Unused marks, which other processes can open if `shared`.
    pub(super) fn take(device: &Device, shared: bool) -> Result<Self, CudaError> {
        if let Some(marks) = free(shared).pop() {
            return Ok(marks);
        }
        Ok(Self { begin: Mark::new(device, shared)?, end: Mark::new(device, shared)? })
    }

    /// Gives them back.
    pub(super) fn give_back(self) {
        free(self.begin.ipc.is_some()).push(self);
    }
}

fn free(shared: bool) -> std::sync::MutexGuard<'static, Vec<Marks>> {
    FREE[usize::from(shared)].lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mark {
    fn new(device: &Device, shared: bool) -> Result<Self, CudaError> {
        device.enter()?;
        let (driver, mut event) = (device.driver(), null_mut());
        let flags = if shared { NO_TIMING | INTERPROCESS } else { NO_TIMING };
        // SAFETY: the out-pointer is valid.
        unsafe { driver_call!(driver, cuEventCreate(&mut event, flags)) }?;
        let mut handle = IpcHandle([0; 8]);
        if shared {
            // SAFETY: the out-pointer is valid, and the event was made to be shared.
            unsafe { driver_call!(driver, cuIpcGetEventHandle(&mut handle, event)) }?;
        }
        Ok(Self { event, ipc: shared.then_some(handle) })
    }

    /// The number by which ranks of this process know it.
    pub(super) fn number(self) -> u64 {
        self.event as u64
    }

    /// Puts it at the end of what was issued on a stream.
    pub(super) fn record(self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both handles are valid.
        unsafe { driver_call!(stream.driver(), cuEventRecord(self.event, stream.handle())) }
    }
}

/// Lets what is issued from now on wait for the mark of this number.
pub(super) fn wait_for(stream: &Stream, number: u64) -> Result<(), CudaError> {
    // SAFETY: numbers are those of marks, which are never destroyed, or of events that were opened here.
    unsafe {
        driver_call!(stream.driver(), cuStreamWaitEvent(stream.handle(), number as Handle, 0))
    }
}

/// The number of a mark of another process.
pub(super) fn open(device: &Device, handle: IpcHandle) -> Result<u64, CudaError> {
    let mut event = null_mut();
    // SAFETY: the out-pointer is valid, and the handle comes from another process's event.
    unsafe { driver_call!(device.driver(), cuIpcOpenEventHandle(&mut event, handle)) }?;
    Ok(event as u64)
}
