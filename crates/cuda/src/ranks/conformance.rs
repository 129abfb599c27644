//! The suite that every transport must pass, over memory of a GPU that ranks share.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

use phalanx_comm::{DeviceMover, Failure, Options, Threads, Waiting, run_ranks};

use super::CudaMover;
use crate::device::{Device, DeviceMemory, Stream};

#[path = "../../../comm/tests/it/suite/mod.rs"]
mod suite;

use suite::{OverDevice, Settings, TestDevice, Transport, Work};

/// A rank's stream, and the memory that its calls use.
struct Gpu {
    device: Arc<Device>,
    stream: Arc<Stream>,
    memory: HashMap<usize, DeviceMemory>,
}

impl Gpu {
    fn new() -> Self {
        let device = Device::first().unwrap();
        let stream = Arc::new(Stream::new(&device).unwrap());
        Self { device, stream, memory: HashMap::new() }
    }
}

impl TestDevice for Gpu {
    fn mover(&self, rank: usize) -> Box<dyn DeviceMover> {
        Box::new(CudaMover::new(rank, false, &self.device, &self.stream))
    }

    fn allocate(&mut self, bytes: usize) -> *mut u8 {
        let memory = DeviceMemory::new(&self.device, bytes).unwrap();
        let address = memory.address();
        self.memory.insert(address as usize, memory);
        address as *mut u8
    }

    fn free(&mut self, memory: *mut u8, _bytes: usize) {
        self.memory.remove(&memory.addr());
    }

    unsafe fn write(&mut self, to: *mut u8, bytes: &[u8]) {
        self.device.enter().unwrap();
        // SAFETY: the caller's.
        unsafe { self.stream.upload(to as u64, bytes) }.unwrap();
    }

    unsafe fn read(&mut self, from: *const u8, bytes: &mut [u8]) {
        self.device.enter().unwrap();
        // SAFETY: the caller's.
        unsafe { self.stream.download(from as u64, bytes) }.unwrap();
    }
}

struct OnGpu(Waiting);

impl Transport for OnGpu {
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure> {
        let Settings { timeout, planted_copy } = settings;
        let options = Options { timeout, planted_copy, waiting: self.0, ..Options::default() };
        let launcher = OverDevice { launcher: Threads { ranks, options }, device: Gpu::new };
        run_ranks(&launcher, work).map(drop)
    }
}

#[test]
fn ranks_on_a_gpu_conform() {
    if let Err(why) = Device::first() {
        let _ = writeln!(std::io::stderr(), "SKIPPED ranks_on_a_gpu_conform: {why}");
        return;
    }
    for waiting in [Waiting::Spin, Waiting::Park] {
        suite::run(&mut OnGpu(waiting)).unwrap();
    }
}
