//! Bytes that the host will upload after the step that runs: they come to the GPU meanwhile, and are then
//! only copied within its memory.
//!
//! It is a guess that changes nothing: what is uploaded is compared with what was expected.

use std::sync::Arc;

use phalanx_call::Tier;
use phalanx_engine::Span;

use crate::device::{Device, DeviceMemory, Mark, PinnedMemory, Stream};
use crate::error::CudaError;
use crate::libraries::Address;

/// What was fetched and is not placed yet.
pub(super) struct Ahead {
    stream: Stream,
    /// Where the last piece has arrived, and where the last one was placed.
    arrived: Mark,
    placed: Mark,
    host: PinnedMemory,
    near: DeviceMemory,
    /// Bytes of both memories that are used, and the pieces in them.
    used: usize,
    pieces: Vec<Piece>,
}

/// Where a piece will go, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Piece {
    into: Span,
    at: usize,
}

/// The GPU's memory for them: half a million tokens with their targets. What has no room comes later. It is
/// allocated before any step, because the driver may wait for all ranks of the GPU when it allocates.
pub(crate) const WINDOW: usize = 4 << 20;

/// Pieces begin at multiples of so many bytes.
const PIECE: usize = 256;

impl Ahead {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(device)?,
            arrived: Mark::new(device)?,
            placed: Mark::new(device)?,
            host: PinnedMemory::new(device, WINDOW)?,
            near: DeviceMemory::new(device, WINDOW)?,
            used: 0,
            pieces: Vec::new(),
        })
    }

    /// Bytes of the GPU's memory.
    pub(super) fn bytes(&self) -> usize {
        self.near.bytes()
    }

    /// Brings bytes near that will be uploaded to a place of the GPU's arena.
    pub(super) fn fetch(&mut self, into: Span, bytes: &[u8]) -> Result<(), CudaError> {
        if into.tier != Tier::Device || bytes.is_empty() {
            return Ok(());
        }
        // What is fetched again was not uploaded as it was expected.
        self.pieces.retain(|piece| piece.into != into);
        let room = bytes.len().next_multiple_of(PIECE);
        if self.pieces.is_empty() || self.bytes() < self.used + room {
            self.begin()?;
        }
        let end = self.used + room;
        if self.bytes() < end {
            return Ok(());
        }
        let at = self.used;
        // SAFETY: the piece lies in the memory, of which nothing that runs uses this part: `begin` waited.
        let staged = unsafe {
            let place = self.host.as_ptr().add(at);
            place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            std::slice::from_raw_parts(place, bytes.len())
        };
        // SAFETY: as above; what placed the last pieces comes before this on the stream.
        unsafe { self.stream.upload(self.near.address() + at as Address, staged)? };
        self.arrived.record(&self.stream)?;
        self.pieces.push(Piece { into, at });
        self.used = end;
        Ok(())
    }

    /// The piece for this place, if it was fetched and has these bytes.
    pub(super) fn take(&mut self, into: Span, bytes: &[u8]) -> Option<Piece> {
        let at = self.pieces.iter().position(|piece| piece.into == into)?;
        let piece = self.pieces.swap_remove(at);
        // SAFETY: the piece was written here and is as long as its place.
        let place = unsafe { self.host.as_ptr().add(piece.at) };
        // SAFETY: as above.
        let expected = unsafe { std::slice::from_raw_parts(place, into.bytes) };
        (expected == bytes).then_some(piece)
    }

    /// Copies a piece to an address.
    ///
    /// # Safety
    /// The place is as long as the piece and is this call's to write, in the order of the stream.
    pub(super) unsafe fn place(
        &self,
        piece: Piece,
        to: Address,
        engine: &Stream,
    ) -> Result<(), CudaError> {
        self.arrived.hold(engine)?;
        // SAFETY: the caller's; the piece has arrived when the stream is here.
        unsafe { engine.copy(self.near.address() + piece.at as Address, to, piece.into.bytes)? };
        self.placed.record(engine)
    }

    /// A new round: nothing of the last one is read any more.
    fn begin(&mut self) -> Result<(), CudaError> {
        self.pieces.clear();
        self.used = 0;
        self.stream.wait()?;
        self.placed.hold(&self.stream)
    }
}
