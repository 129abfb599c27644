//! What a GPU does right now: NVML, which comes with the driver.

use std::ffi::c_char;

use super::{Handle, library};

library! {
    /// Functions of NVML.
    Nvml: "NVML" in &["libnvidia-ml.so.1"], "NVIDIA's driver (570 or newer)";
    fn nvmlInit_v2();
    fn nvmlDeviceGetHandleByUUID(*const c_char, *mut Handle);
    fn nvmlDeviceGetClockInfo(Handle, i32, *mut u32);
    fn nvmlDeviceGetPowerUsage(Handle, *mut u32);
    fn nvmlDeviceGetComputeRunningProcesses_v3(Handle, *mut u32, *mut RunningProcess);
}

/// A process that uses a GPU, as NVML fills it in.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct RunningProcess {
    pub(crate) process: u32,
    /// Bytes; all ones if they are not known.
    pub(crate) used: u64,
    instances: [u32; 2],
}
