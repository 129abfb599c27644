//! Places in streams that other streams wait for.

use std::ptr::null_mut;
use std::sync::Arc;

use super::{Device, Stream};
use crate::error::CudaError;
use crate::libraries::{Handle, driver_call};

/// A place in a stream, which moves whenever it is recorded again.
pub(crate) struct Mark {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: an event is a handle that any thread may use.
unsafe impl Send for Mark {}

/// Of `cuEventCreate`: no time is taken.
const NO_TIMING: u32 = 2;

impl Mark {
    /// A mark that is nowhere yet; nothing waits for it.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = null_mut();
        // SAFETY: the out-pointer is valid.
        unsafe { driver_call!(device.driver(), cuEventCreate(&mut handle, NO_TIMING)) }?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Puts it at the end of what was issued on a stream.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both handles are valid.
        unsafe { driver_call!(stream.driver(), cuEventRecord(self.handle, stream.handle())) }
    }

    /// Lets what is issued on a stream from now on wait for it.
    pub(crate) fn hold(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both handles are valid.
        unsafe { driver_call!(stream.driver(), cuStreamWaitEvent(stream.handle(), self.handle, 0)) }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the event is this value's own; the driver keeps it until no stream needs it.
            unsafe { (self.device.driver().cuEventDestroy_v2)(self.handle) };
        }
    }
}
