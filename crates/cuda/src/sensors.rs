//! What a GPU does right now: memory, clock, power, and who else uses it.
//!
//! It only informs. Where NVML is missing or refuses, numbers are missing too.

use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::OnceLock;

use crate::device::Device;
use crate::error::CudaError;
use crate::libraries::{Handle, Nvml, RunningProcess};

/// What a GPU does right now.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct GpuNow {
    /// Bytes of its memory that are used, by all processes.
    pub used: u64,
    /// Its clock in MHz.
    pub clock_mhz: Option<u32>,
    /// Its power in watts.
    pub watts: Option<f64>,
}

/// NVML's handle of this process's GPU.
struct Sensor {
    nvml: &'static Nvml,
    device: Handle,
}

// SAFETY: NVML may be called from any thread, and handles stay valid.
unsafe impl Send for Sensor {}
// SAFETY: as above.
unsafe impl Sync for Sensor {}

/// Of `nvmlDeviceGetClockInfo`: the clock of the processors.
const PROCESSOR_CLOCK: i32 = 1;

/// NVML's word for an amount that it does not know.
const UNKNOWN: u64 = u64::MAX;

impl Device {
    /// What it does right now.
    pub fn now(&self) -> Result<GpuNow, CudaError> {
        let (free, total) = self.memory()?;
        let used = (total - free) as u64;
        let Some(Sensor { nvml, device }) = self.sensor() else {
            return Ok(GpuNow { used, ..GpuNow::default() });
        };
        let (mut clock, mut milliwatts) = (0, 0);
        // SAFETY: the handle is valid, and so are the out-pointers.
        let (clocked, powered) = unsafe {
            (
                (nvml.nvmlDeviceGetClockInfo)(*device, PROCESSOR_CLOCK, &mut clock) == 0,
                (nvml.nvmlDeviceGetPowerUsage)(*device, &mut milliwatts) == 0,
            )
        };
        Ok(GpuNow {
            used,
            clock_mhz: clocked.then_some(clock),
            watts: powered.then_some(f64::from(milliwatts) / 1e3),
        })
    }

    /// The other processes that compute on it, as far as the driver shows them: their numbers, and bytes if
    /// they are known.
    pub fn others(&self) -> Vec<(u32, Option<u64>)> {
        let Some(Sensor { nvml, device }) = self.sensor() else { return Vec::new() };
        let mut list = [RunningProcess::default(); 64];
        let mut count = list.len() as u32;
        // SAFETY: the handle is valid, and the list has as many entries as is said.
        let status = unsafe {
            let list = list.as_mut_ptr();
            (nvml.nvmlDeviceGetComputeRunningProcesses_v3)(*device, &mut count, list)
        };
        let found = if status == 0 { count as usize } else { 0 };
        let others = list[..found].iter().filter(|other| other.process != std::process::id());
        others.map(|other| (other.process, (other.used != UNKNOWN).then_some(other.used))).collect()
    }

    fn sensor(&self) -> Option<&'static Sensor> {
        static SENSOR: OnceLock<Option<Sensor>> = OnceLock::new();
        SENSOR.get_or_init(|| Sensor::open(self.uuid())).as_ref()
    }
}

impl Sensor {
    fn open(uuid: &[u8; 16]) -> Option<Self> {
        let nvml = Nvml::get().ok()?;
        let (name, mut device) = (CString::new(name(uuid)).ok()?, null_mut());
        // SAFETY: the name is a string, and the out-pointer is valid.
        let status = unsafe {
            (nvml.nvmlInit_v2)();
            (nvml.nvmlDeviceGetHandleByUUID)(name.as_ptr(), &mut device)
        };
        (status == 0).then_some(Self { nvml, device })
    }
}

/// The name that NVML knows a GPU by.
fn name(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (i, byte) in uuid.iter().enumerate() {
        text += if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_as_nvml_names_it() {
        let uuid = std::array::from_fn(|i| 0x10 * (i as u8 % 16) + i as u8 % 16);
        assert_eq!(name(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
