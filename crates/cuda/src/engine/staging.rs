//! Transfers whose calls were started, and memory of the host through which they go if they must.

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
        if let InFlight { staged: Some(Staged { source, target, .. }), .. } = flight {
            self.free.extend([source, target]);
        }
    }
}

/// A transfer whose calls were started.
pub(super) struct InFlight {
    pub(super) handles: Vec<Handle>,
    /// What is given and what is received into; null where a side is not used.
    send: *const u8,
    receive: *mut u8,
    /// If calls move the host's memory.
    pub(super) staged: Option<Staged>,
}

// SAFETY: the addresses are those of a GPU's memory, or of buffers that the flight owns.
unsafe impl Send for InFlight {}

/// Copies of both sides in the host's memory.
pub(super) struct Staged {
    pub(super) source: Buffer,
    pub(super) target: Buffer,
    /// Where the target goes on the GPU.
    pub(super) to: Option<Address>,
}

impl InFlight {
    /// With both sides, each an address and bytes, where they are.
    pub(super) fn on_device(
        source: Option<(Address, usize)>,
        target: Option<(Address, usize)>,
    ) -> Self {
        let at = |side: Option<(Address, usize)>| side.map_or(0, |(address, _)| address);
        Self {
            handles: Vec::new(),
            send: at(source) as *const u8,
            receive: at(target) as *mut u8,
            staged: None,
        }
    }

    /// With copies of both sides.
    pub(super) fn new(
        staging: &mut Staging,
        source: Option<(Address, usize)>,
        target: Option<(Address, usize)>,
    ) -> Self {
        let bytes = |side: Option<(Address, usize)>| side.map_or(0, |(_, bytes)| bytes);
        let mut staged = Staged {
            source: staging.take(bytes(source)),
            target: staging.take(bytes(target)),
            to: target.map(|(address, _)| address),
        };
        let send = source.map_or(std::ptr::null(), |_| staged.source.bytes_mut().as_ptr());
        let receive =
            target.map_or(std::ptr::null_mut(), |_| staged.target.bytes_mut().as_mut_ptr());
        Self { handles: Vec::new(), send, receive, staged: Some(staged) }
    }

    /// The addresses of both sides from a byte on; null where a side is not used.
    pub(super) fn sides(&self, offset: usize) -> (*const u8, *mut u8) {
        let given = !self.send.is_null();
        let wanted = !self.receive.is_null();
        (
            self.send.wrapping_add(if given { offset } else { 0 }),
            self.receive.wrapping_add(if wanted { offset } else { 0 }),
        )
    }
}
