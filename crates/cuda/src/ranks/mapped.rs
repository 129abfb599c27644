//! Memory and marks of other processes of this host, as this process sees them.

use std::collections::HashMap;
use std::sync::Arc;

use super::marks;
use crate::device::Device;
use crate::error::CudaError;
use crate::libraries::{Address, IpcHandle, driver_call};

/// What was opened of others.
pub(super) struct Mapped {
    device: Arc<Device>,
    /// For each rank its arena: what it is opened by, and where this process sees it.
    arenas: HashMap<u64, (IpcHandle, Address)>,
    marks: HashMap<IpcHandle, u64>,
}

/// Of `cuIpcOpenMemHandle`: the only value that the driver takes.
const LAZY_PEER_ACCESS: u32 = 1;

impl Mapped {
    pub(super) fn new(device: &Arc<Device>) -> Self {
        Self { device: device.clone(), arenas: HashMap::new(), marks: HashMap::new() }
    }

    /// Where this process sees the memory that a rank shows it. If it has new memory, the old is let go.
    pub(super) fn arena(&mut self, rank: u64, handle: IpcHandle) -> Result<Address, CudaError> {
        match self.arenas.get(&rank) {
            Some((known, address)) if *known == handle => return Ok(*address),
            Some((_, old)) => self.close(*old),
            None => {}
        }
        let mut address = 0;
        // SAFETY: the out-pointer is valid, and the handle comes from another process's memory.
        unsafe {
            let driver = self.device.driver();
            driver_call!(driver, cuIpcOpenMemHandle_v2(&mut address, handle, LAZY_PEER_ACCESS))?;
        }
        self.arenas.insert(rank, (handle, address));
        Ok(address)
    }

    /// The number of another process's mark.
    pub(super) fn mark(&mut self, handle: IpcHandle) -> Result<u64, CudaError> {
        if let Some(known) = self.marks.get(&handle) {
            return Ok(*known);
        }
        let mark = marks::open(&self.device, handle)?;
        self.marks.insert(handle, mark);
        Ok(mark)
    }

    fn close(&self, address: Address) {
        // SAFETY: it was opened here, and the rank that it belongs to shows other memory now, so its
        // calls on the old have ended. If closing fails, the memory stays mapped, which harms nothing.
        unsafe { (self.device.driver().cuIpcCloseMemHandle)(address) };
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            self.arenas.values().for_each(|(_, address)| self.close(*address));
        }
    }
}
