//! The driver: contexts, memory, streams, modules, launches.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;

use super::{Address, Handle, library};
use crate::error::CudaError;

library! {
    /// Functions of the driver.
    Driver: "the CUDA driver" in &["libcuda.so.1"], "NVIDIA's driver (570 or newer)";
    fn cuInit(u32);
    fn cuDeviceGet(*mut i32, i32);
    fn cuDeviceGetCount(*mut i32);
    fn cuDeviceGetName(*mut c_char, i32, i32);
    fn cuDeviceGetAttribute(*mut i32, i32, i32);
    fn cuDevicePrimaryCtxRetain(*mut Handle, i32);
    fn cuCtxSetCurrent(Handle);
    fn cuMemGetInfo_v2(*mut usize, *mut usize);
    fn cuMemAlloc_v2(*mut Address, usize);
    fn cuMemFree_v2(Address);
    fn cuMemHostAlloc(*mut *mut c_void, usize, u32);
    fn cuMemFreeHost(*mut c_void);
    fn cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle);
    fn cuMemcpyDtoDAsync_v2(Address, Address, usize, Handle);
    fn cuMemsetD8Async(Address, u8, usize, Handle);
    fn cuStreamCreate(*mut Handle, u32);
    fn cuStreamDestroy_v2(Handle);
    fn cuStreamSynchronize(Handle);
    fn cuEventCreate(*mut Handle, u32);
    fn cuEventDestroy_v2(Handle);
    fn cuEventRecord(Handle, Handle);
    fn cuEventElapsedTime(*mut f32, Handle, Handle);
    fn cuModuleLoadData(*mut Handle, *const c_void);
    fn cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    fn cuFuncSetAttribute(Handle, i32, i32);
    fn cuLaunchKernel(
        Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void,
    );
    fn cuGetErrorString(i32, *mut *const c_char);
}

impl Driver {
    /// Fails unless a call's status is success.
    pub(crate) fn check(&self, function: &'static str, status: i32) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let mut text: *const c_char = null();
        // SAFETY: the driver fills in a string that it keeps.
        let text = unsafe {
            (self.cuGetErrorString)(status, &mut text);
            match text.is_null() {
                true => "an unknown error".into(),
                false => CStr::from_ptr(text).to_string_lossy(),
            }
        };
        Err(CudaError::Call { function, why: format!("{text} (status {status})") })
    }
}

/// Calls a function of the driver and checks its status.
macro_rules! driver_call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $driver.check(stringify!($function), ($driver.$function)($($argument),*))
    };
}
pub(crate) use driver_call;
