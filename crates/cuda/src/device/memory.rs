//! Memory of a GPU, and memory of the host that a GPU can address.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::Device;
use crate::error::CudaError;
use crate::libraries::{Address, driver_call};

/// A piece of a GPU's memory.
pub(crate) struct DeviceMemory {
    device: Arc<Device>,
    address: Address,
    bytes: usize,
}

impl DeviceMemory {
    /// So many bytes, of any content.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        device.enter()?;
        let mut address = 0;
        // The driver refuses nothing at all.
        // SAFETY: the out-pointer is valid.
        unsafe { driver_call!(device.driver(), cuMemAlloc_v2(&mut address, bytes.max(256))) }?;
        Ok(Self { device: device.clone(), address, bytes })
    }

    pub(crate) fn address(&self) -> Address {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Freeing waits for what still runs, so nothing can use the memory any more.
        if self.device.enter().is_ok() {
            // SAFETY: the memory is this value's own.
            unsafe { (self.device.driver().cuMemFree_v2)(self.address) };
        }
    }
}

/// Memory of the host that the GPU reads and writes at the same address.
pub(crate) struct PinnedMemory {
    device: Arc<Device>,
    address: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is this value's own.
unsafe impl Send for PinnedMemory {}

/// Of `cuMemHostAlloc`: all contexts can use it, and kernels can address it.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

impl PinnedMemory {
    /// So many bytes, zeroed.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        device.enter()?;
        let (mut address, bytes) = (null_mut::<c_void>(), bytes.max(64));
        // SAFETY: the out-pointer is valid; the memory is as long as was asked for.
        unsafe {
            let driver = device.driver();
            driver_call!(driver, cuMemHostAlloc(&mut address, bytes, PORTABLE_AND_MAPPED))?;
            address.cast::<u8>().write_bytes(0, bytes);
        }
        Ok(Self { device: device.clone(), address: address.cast(), bytes })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: the memory is this value's own.
            unsafe { (self.device.driver().cuMemFreeHost)(self.address.cast()) };
        }
    }
}
