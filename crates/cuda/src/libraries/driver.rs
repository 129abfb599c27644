//! The driver: contexts, memory, streams, modules, launches.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;

use super::{Address, Handle, library};
use crate::error::CudaError;

/// What another process opens a piece of memory or an event by.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct IpcHandle(pub(crate) [u64; 8]);

library! {
    /// Functions of the driver.
    Driver: "the CUDA driver" in &["libcuda.so.1"], "NVIDIA's driver (570 or newer)";
    fn cuInit(u32);
    fn cuDeviceGet(*mut i32, i32);
    fn cuDeviceGetCount(*mut i32);
    fn cuDeviceGetName(*mut c_char, i32, i32);
    fn cuDeviceGetAttribute(*mut i32, i32, i32);
    fn cuDeviceGetUuid_v2(*mut [u8; 16], i32);
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
    fn cuMemGetAddressRange_v2(*mut Address, *mut usize, Address);
    fn cuIpcGetMemHandle(*mut IpcHandle, Address);
    fn cuIpcOpenMemHandle_v2(*mut Address, IpcHandle, u32);
    fn cuIpcCloseMemHandle(Address);
    fn cuIpcGetEventHandle(*mut IpcHandle, Handle);
    fn cuIpcOpenEventHandle(*mut Handle, IpcHandle);
    fn cuMemsetD8Async(Address, u8, usize, Handle);
    fn cuStreamCreate(*mut Handle, u32);
    fn cuStreamDestroy_v2(Handle);
    fn cuStreamSynchronize(Handle);
    fn cuStreamWaitEvent(Handle, Handle, u32);
    fn cuStreamWriteValue32_v2(Handle, Address, u32, u32);
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
    fn cuStreamBeginCapture_v2(Handle, i32);
    fn cuStreamEndCapture(Handle, *mut Handle);
    fn cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    fn cuGraphLaunch(Handle, Handle);
    fn cuGraphDestroy(Handle);
    fn cuGraphExecDestroy(Handle);
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
        let hint = hint(status).map_or(String::new(), |hint| format!("; {hint}"));
        Err(CudaError::Call { function, why: format!("{text} (status {status}){hint}") })
    }
}

/// What to do about a status that says more about the machine than about a call.
fn hint(status: i32) -> Option<&'static str> {
    Some(match status {
        2 => "the GPU's memory is full: end other programs that use it (nvidia-smi lists them)",
        35 | 36 | 803 | 804 => {
            "the driver does not fit: install NVIDIA's driver 570 or newer and restart"
        }
        46 => {
            "another program has the GPU to itself: end it, or allow sharing with nvidia-smi -c DEFAULT"
        }
        100 | 101 => {
            "no GPU is visible: nvidia-smi lists them, and CUDA_VISIBLE_DEVICES may hide them"
        }
        200 | 209 | 222 => {
            "the driver is older than NVRTC: install a newer driver, or an NVRTC of its version"
        }
        700 | 716..=719 => {
            "a kernel failed: this is an error of ours, or the GPU's memory is damaged"
        }
        _ => return None,
    })
}

/// Calls a function of the driver and checks its status.
macro_rules! driver_call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $driver.check(stringify!($function), ($driver.$function)($($argument),*))
    };
}
pub(crate) use driver_call;
