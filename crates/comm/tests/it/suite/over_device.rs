//! Runs cases over memory that the processor cannot address: what a case gives is copied to the device, and what
//! it receives is copied back.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_call::MemoryKind;
use phalanx_comm::{
    Algorithm, Busy, Call, CommError, Communicator, DeviceMover, Group, GroupId, Handle, Launcher,
    LocalRank, Stop, Traffic,
};

/// A rank's queue of a device under test.
pub(crate) trait TestDevice: Send {
    /// What moves memory on this queue.
    fn mover(&self, rank: usize) -> Box<dyn DeviceMover>;

    /// Memory of the device, aligned to 16 bytes.
    fn allocate(&mut self, bytes: usize) -> *mut u8;

    /// Gives memory back.
    fn free(&mut self, memory: *mut u8, bytes: usize);

    /// Copies to the device, behind what is on the queue.
    ///
    /// # Safety
    /// The memory is as long.
    unsafe fn write(&mut self, to: *mut u8, bytes: &[u8]);

    /// Copies from the device, when everything on the queue is done.
    ///
    /// # Safety
    /// The memory is as long.
    unsafe fn read(&mut self, from: *const u8, bytes: &mut [u8]);
}

/// Ranks of a launcher, each with a queue of a device.
pub(crate) struct OverDevice<L, F> {
    pub(crate) launcher: L,
    pub(crate) device: F,
}

impl<L: Launcher, D: TestDevice + 'static, F: Fn() -> D> Launcher for OverDevice<L, F> {
    fn ranks(&self) -> usize {
        self.launcher.ranks()
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let over = |LocalRank { endpoint, cores }| {
            let endpoint: Box<dyn Communicator> =
                Box::new(DeviceEndpoint::new(endpoint, Box::new((self.device)())));
            LocalRank { endpoint, cores }
        };
        Ok(self.launcher.launch()?.into_iter().map(over).collect())
    }
}

/// An endpoint that cases give memory of the host.
struct DeviceEndpoint {
    /// Dropped first: other ranks may be using the memory.
    inner: Option<Box<dyn Communicator>>,
    device: Box<dyn TestDevice>,
    calls: HashMap<u32, Copies>,
}

/// The memory of a call.
struct Copies {
    send: (*mut u8, usize),
    /// Of the device, of the host, and how long; nothing if it is a part of what is sent.
    receive: (*mut u8, *mut u8, usize),
    owns: [bool; 2],
}

// SAFETY: the addresses are only used under the rules of `start`.
unsafe impl Send for DeviceEndpoint {}

impl DeviceEndpoint {
    fn new(mut inner: Box<dyn Communicator>, device: Box<dyn TestDevice>) -> Self {
        assert!(inner.attach(device.mover(inner.rank())).is_ok(), "the transport takes no mover");
        Self { inner: Some(inner), device, calls: HashMap::new() }
    }

    fn inner(&mut self) -> &mut dyn Communicator {
        self.inner.as_deref_mut().expect("it is there until the drop")
    }

    fn seen(&self) -> &dyn Communicator {
        self.inner.as_deref().expect("it is there until the drop")
    }

    /// Copies both sides of a call to the device.
    ///
    /// # Safety
    /// As for `start`.
    unsafe fn copies(&mut self, call: &Call<'_>, send: *const u8, receive: *mut u8) -> Copies {
        let (n, me) = {
            let group = self.seen().members(call.group);
            (group.len(), group.index_of(self.seen().rank()).unwrap_or(0))
        };
        let (given, got) = call.elements(n, me).unwrap_or((0, 0));
        let size = call.dtype.size();
        let fits = |pointer: *const u8, count: usize| match pointer.is_null() {
            true => 0,
            false => count.saturating_mul(size).min(1 << 24),
        };
        let (given, got) = (fits(send, given), fits(receive, got));
        let inside = |one: *const u8, len: usize, other: *const u8, of: usize| {
            len > 0 && one >= other && one.wrapping_add(len) <= other.wrapping_add(of)
        };
        let (mut copy, mut owns) = (
            |from: *const u8, bytes: usize| {
                let to = self.device.allocate(bytes.max(16));
                // SAFETY: the caller guarantees the bytes, and the memory is as long.
                unsafe { self.device.write(to, std::slice::from_raw_parts(from, bytes)) };
                to
            },
            [given > 0, got > 0],
        );
        let (mut sent, mut received) = (send.cast_mut(), receive);
        if inside(send, given, receive.cast_const(), got) {
            owns[0] = false;
            received = copy(receive.cast_const(), got);
            sent = received.wrapping_add(send.addr() - receive.addr());
        } else if inside(receive.cast_const(), got, send, given) {
            owns[1] = false;
            sent = copy(send, given);
            received = sent.wrapping_add(receive.addr() - send.addr());
        } else {
            sent = if given > 0 { copy(send, given) } else { sent };
            received = if got > 0 { copy(receive.cast_const(), got) } else { received };
        }
        Copies { send: (sent, given), receive: (received, receive, got), owns }
    }

    fn release(&mut self, copies: &Copies) {
        if copies.owns[0] {
            self.device.free(copies.send.0, copies.send.1.max(16));
        }
        if copies.owns[1] {
            self.device.free(copies.receive.0, copies.receive.2.max(16));
        }
    }
}

impl Communicator for DeviceEndpoint {
    fn rank(&self) -> usize {
        self.seen().rank()
    }

    fn world(&self) -> usize {
        self.seen().world()
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::HOST
    }

    fn group(&mut self, group: &Group) -> Result<GroupId, CommError> {
        self.inner().group(group)
    }

    fn members(&self, id: GroupId) -> &Group {
        self.seen().members(id)
    }

    fn algorithm(&self, call: &Call<'_>) -> Algorithm {
        self.seen().algorithm(call)
    }

    unsafe fn start(
        &mut self,
        call: &Call<'_>,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<Handle, CommError> {
        // SAFETY: the caller's promises are passed on, with copies that live until the call has ended.
        unsafe {
            let copies = self.copies(call, send, receive);
            let (sent, received) = (copies.send.0.cast_const(), copies.receive.0);
            match self.inner().start(call, sent, received) {
                Ok(handle) => {
                    self.calls.insert(handle.number(), copies);
                    Ok(handle)
                }
                Err(error) => {
                    self.release(&copies);
                    Err(error)
                }
            }
        }
    }

    fn wait(&mut self, handle: Handle) -> Result<(), CommError> {
        let number = handle.number();
        self.inner().wait(handle)?;
        if let Some(copies) = self.calls.remove(&number) {
            let (from, to, bytes) = copies.receive;
            if bytes > 0 {
                // SAFETY: by the rules of `start` the receiving buffer may be written until now.
                unsafe { self.device.read(from, std::slice::from_raw_parts_mut(to, bytes)) };
            }
            self.release(&copies);
        }
        Ok(())
    }

    fn test(&mut self, handle: &Handle) -> Result<bool, CommError> {
        self.inner().test(handle)
    }

    fn progress(&mut self) -> Result<(), CommError> {
        self.inner().progress()
    }

    fn traffic(&self) -> &Traffic {
        self.seen().traffic()
    }

    fn reset_traffic(&mut self) {
        self.inner().reset_traffic();
    }

    fn busy(&self) -> Busy {
        self.seen().busy()
    }

    fn abort(&mut self, message: &str) {
        self.inner().abort(message);
    }

    fn stopper(&self) -> Arc<dyn Stop> {
        self.seen().stopper()
    }
}

impl Drop for DeviceEndpoint {
    fn drop(&mut self) {
        self.inner = None;
        for (_, copies) in std::mem::take(&mut self.calls) {
            self.release(&copies);
        }
    }
}
