//! What was issued on a queue, kept as a graph: issuing it again is one call.

use std::ptr::null_mut;
use std::sync::Arc;

use super::{Device, Stream};
use crate::error::CudaError;
use crate::libraries::{Handle, driver_call};

/// Work that was captured, ready to be issued many times.
pub(crate) struct CapturedWork {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: a graph is a handle that any thread may use; one thread at a time does.
unsafe impl Send for CapturedWork {}

/// Of `cuStreamBeginCapture`: all threads may do as they like meanwhile. Libraries load kernels when they
/// are first used, which other modes forbid.
const RELAXED: i32 = 2;

impl CapturedWork {
    /// Captures what `issue` issues on a stream; nothing of it runs.
    pub(crate) fn of<E: From<CudaError>>(
        stream: &Stream,
        issue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let driver = stream.driver();
        // SAFETY: the stream is valid.
        unsafe { driver_call!(driver, cuStreamBeginCapture_v2(stream.handle(), RELAXED)) }?;
        let issued = issue();
        let (mut graph, mut handle) = (null_mut(), null_mut());
        // SAFETY: the stream is capturing, which ends here whether issuing worked or not; the
        // out-pointers are valid, and an instance does not need its graph any more.
        unsafe {
            let ended = driver_call!(driver, cuStreamEndCapture(stream.handle(), &mut graph));
            issued?;
            ended?;
            let made = driver_call!(driver, cuGraphInstantiateWithFlags(&mut handle, graph, 0));
            (driver.cuGraphDestroy)(graph);
            made?;
        }
        Ok(Self { device: stream.device().clone(), handle })
    }

    /// Issues it.
    ///
    /// # Safety
    /// All memory that it uses is still there, and this launch's to use in the order of the stream.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { driver_call!(stream.driver(), cuGraphLaunch(self.handle, stream.handle())) }
    }
}

impl Drop for CapturedWork {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the instance is this value's own.
            unsafe { (self.device.driver().cuGraphExecDestroy)(self.handle) };
        }
    }
}
