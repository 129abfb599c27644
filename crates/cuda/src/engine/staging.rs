//! Memory of the host through which ranks exchange.

use phalanx_comm::Handle;

use crate::libraries::Address;

/// Bytes that are aligned for every element type.
#[derive(Default)]
pub(super) struct Buffer {
    words: Vec<u64>,
    bytes: usize,
}

impl Buffer {
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the words are at least as many bytes, initialised, and bytes need no alignment.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }

    fn resize(mut self, bytes: usize) -> Self {
        self.words.resize(bytes.div_ceil(8), 0);
        self.bytes = bytes;
        self
    }
}

/// Buffers that are free again: after the first steps, none are allocated.
#[derive(Default)]
pub(super) struct Staging {
    free: Vec<Buffer>,
}

impl Staging {
    fn take(&mut self, bytes: usize) -> Buffer {
        let fits = |buffer: &Buffer| buffer.words.capacity() * 8 >= bytes;
        let at = self.free.iter().position(fits);
        at.map(|at| self.free.swap_remove(at)).unwrap_or_default().resize(bytes)
    }

    pub(super) fn give_back(&mut self, flight: InFlight) {
        self.free.extend([flight.source, flight.target]);
    }
}

/// A transfer whose calls were started.
pub(super) struct InFlight {
    pub(super) handles: Vec<Handle>,
    pub(super) source: Buffer,
    pub(super) target: Buffer,
    /// Where the target goes on the GPU.
    pub(super) to: Option<Address>,
    gives: bool,
}

impl InFlight {
    /// With buffers for what is given and what is received, each an address and bytes.
    pub(super) fn new(
        staging: &mut Staging,
        source: Option<(Address, usize)>,
        target: Option<(Address, usize)>,
    ) -> Self {
        let bytes = |side: Option<(Address, usize)>| side.map_or(0, |(_, bytes)| bytes);
        Self {
            handles: Vec::new(),
            source: staging.take(bytes(source)),
            target: staging.take(bytes(target)),
            to: target.map(|(address, _)| address),
            gives: source.is_some(),
        }
    }

    /// The addresses of both sides from a byte on; null where a side is not used.
    pub(super) fn sides(&mut self, offset: usize) -> (*const u8, *mut u8) {
        let send = match self.gives {
            true => self.source.bytes_mut()[offset..].as_ptr(),
            false => std::ptr::null(),
        };
        let receive = match self.to {
            Some(_) => self.target.bytes_mut()[offset..].as_mut_ptr(),
            None => std::ptr::null_mut(),
        };
        (send, receive)
    }
}
