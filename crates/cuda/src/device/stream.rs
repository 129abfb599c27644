//! A queue of a GPU: copies and kernels run in the order in which they are issued.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use super::Device;
use crate::error::CudaError;
use crate::libraries::{Address, Driver, Handle, driver_call};

/// A queue.
pub(crate) struct Stream {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: a stream is a handle that any thread may use.
unsafe impl Send for Stream {}
// SAFETY: as above; what several threads issue has some order.
unsafe impl Sync for Stream {}

/// Of `cuStreamCreate`: it does not wait for the stream that the libraries use by default.
const NON_BLOCKING: u32 = 1;

impl Stream {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = null_mut();
        // SAFETY: the out-pointer is valid.
        unsafe { driver_call!(device.driver(), cuStreamCreate(&mut handle, NON_BLOCKING)) }?;
        Ok(Self { device: device.clone(), handle })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.device.driver()
    }

    /// Returns when everything that was issued has ended.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is valid.
        unsafe { driver_call!(self.driver(), cuStreamSynchronize(self.handle)) }
    }

    /// Copies bytes of the host to the GPU. The bytes are free again when this returns.
    ///
    /// # Safety
    /// The bytes from `to` on are this call's to write, in the order of the stream.
    pub(crate) unsafe fn upload(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (from, len) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the caller's; pageable memory is read before the call returns.
        unsafe { driver_call!(self.driver(), cuMemcpyHtoDAsync_v2(to, from, len, self.handle)) }
    }

    /// Copies bytes of the GPU to the host, and waits for them.
    ///
    /// # Safety
    /// The bytes from `from` on are this call's to read, in the order of the stream.
    pub(crate) unsafe fn download(&self, from: Address, out: &mut [u8]) -> Result<(), CudaError> {
        if !out.is_empty() {
            let (to, len) = (out.as_mut_ptr().cast(), out.len());
            // SAFETY: the caller's; the call is waited for below.
            unsafe {
                driver_call!(self.driver(), cuMemcpyDtoHAsync_v2(to, from, len, self.handle))?;
            }
        }
        self.wait()
    }

    /// Copies bytes within the GPU.
    ///
    /// # Safety
    /// Both places are this call's to use, in the order of the stream, and do not overlap.
    pub(crate) unsafe fn copy(
        &self,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { driver_call!(self.driver(), cuMemcpyDtoDAsync_v2(to, from, bytes, self.handle)) }
    }

    /// Sets every byte of a place.
    ///
    /// # Safety
    /// The place is this call's to write, in the order of the stream.
    pub(crate) unsafe fn set(&self, to: Address, byte: u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { driver_call!(self.driver(), cuMemsetD8Async(to, byte, bytes, self.handle)) }
    }

    /// Writes a number of four bytes when everything that was issued before has ended.
    ///
    /// # Safety
    /// The place is this call's to write, in the order of the stream.
    pub(crate) unsafe fn write_number(&self, to: Address, number: u32) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { driver_call!(self.driver(), cuStreamWriteValue32_v2(self.handle, to, number, 0)) }
    }

    /// A mark of the present place in the queue, whose time is taken when the GPU reaches it.
    pub(crate) fn mark(&self) -> Result<TimeMark, CudaError> {
        let mut handle = null_mut();
        // SAFETY: the out-pointer is valid, and so are both handles.
        unsafe {
            driver_call!(self.driver(), cuEventCreate(&mut handle, 0))?;
            driver_call!(self.driver(), cuEventRecord(handle, self.handle))?;
        }
        Ok(TimeMark { device: self.device.clone(), handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the stream is this value's own; what was issued may still end.
            unsafe {
                (self.driver().cuStreamSynchronize)(self.handle);
                (self.driver().cuStreamDestroy_v2)(self.handle);
            }
        }
    }
}

/// A place in a queue.
pub(crate) struct TimeMark {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: an event is a handle that any thread may use.
unsafe impl Send for TimeMark {}

impl TimeMark {
    /// The time from an earlier mark to this one; both must have been reached.
    pub(crate) fn since(&self, earlier: &TimeMark) -> Result<Duration, CudaError> {
        let (driver, mut milliseconds) = (self.device.driver(), 0.0f32);
        // SAFETY: the out-pointer is valid, and so are both handles.
        unsafe {
            driver_call!(
                driver,
                cuEventElapsedTime(&mut milliseconds, earlier.handle, self.handle)
            )?;
        }
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for TimeMark {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the event is this value's own.
            unsafe { (self.device.driver().cuEventDestroy_v2)(self.handle) };
        }
    }
}
