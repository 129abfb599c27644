//! A group's own communicator of NCCL, stream and memory: its calls run in their order there, and those of
//! other groups beside them.

use std::ptr::null_mut;
use std::sync::Arc;

use phalanx_comm::{Call, Combining, DeviceMover, StridedRows};

use super::exchange::{Exchange, Piece, Side, Steps};
use crate::device::{Device, DeviceMemory, Stream};
use crate::error::CudaError;
use crate::libraries::{Address, Handle, Nccl, UniqueId};
use crate::ranks::marks::{self, Marks};
use crate::ranks::mover::CudaMover;

/// What a group's calls use.
pub(super) struct Line {
    table: &'static Nccl,
    /// Null if the group has one rank.
    comm: Handle,
    places: usize,
    me: usize,
    device: Arc<Device>,
    stream: Arc<Stream>,
    /// Where a call begins on the engine's stream, and where the last one ends on this one.
    marks: Marks,
    /// Copies and combines on this stream.
    mover: CudaMover,
    /// For pieces that are not one run of bytes, and for those that are combined.
    staging: Option<DeviceMemory>,
}

// SAFETY: the communicator is this value's own, and one thread at a time uses it.
unsafe impl Send for Line {}

/// Both buffers of a call.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    pub(super) given: Address,
    pub(super) wanted: Address,
}

/// Of NCCL: elements are bytes.
const BYTES: i32 = 1;

/// Pieces in the staging memory begin at multiples of this.
const ALIGN: usize = 256;

impl Line {
    /// A line of the place `me` in a group; all members make theirs at the same time, with the id that one
    /// of them has asked for ([`new_id`]).
    pub(super) fn new(
        device: &Arc<Device>,
        id: UniqueId,
        [places, me]: [usize; 2],
    ) -> Result<Self, CudaError> {
        let (table, mut comm) = (Nccl::get()?, null_mut());
        device.enter()?;
        // SAFETY: the out-pointer is valid, and the GPU's context is current.
        let status = unsafe { (table.ncclCommInitRank)(&mut comm, places as i32, id, me as i32) };
        check("ncclCommInitRank", status)?;
        Self::over(device, table, comm, [places, me])
    }

    /// A line of a group of one rank, which needs no communicator.
    pub(super) fn alone(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::over(device, Nccl::get()?, null_mut(), [1, 0])
    }

    fn over(
        device: &Arc<Device>,
        table: &'static Nccl,
        comm: Handle,
        [places, me]: [usize; 2],
    ) -> Result<Self, CudaError> {
        let stream = Arc::new(Stream::new(device)?);
        let marks = Marks::take(device, false)?;
        let mover = CudaMover::new(me, false, device, &stream);
        let (device, staging) = (device.clone(), None);
        Ok(Self { table, comm, places, me, device, stream, marks, mover, staging })
    }

    /// Issues a call behind what is on the engine's stream; gives the bytes that it moves here.
    ///
    /// # Safety
    /// The buffers are as long as the call's blocks span, and are this call's to use until its end, which
    /// [`Line::end`] waits for.
    pub(super) unsafe fn start(
        &mut self,
        call: &Call<'_>,
        steps: &Steps,
        buffers: Buffers,
        engine: &Stream,
    ) -> Result<usize, CudaError> {
        self.device.enter()?;
        self.marks.begin.record(engine)?;
        marks::wait_for(&self.stream, self.marks.begin.number())?;
        let summands: Vec<usize> = steps.summands(self.places, self.me).collect();
        let each = steps.combined.map_or(0, |[own, _]| own.bytes());
        let staged = |exchange: &Exchange| -> usize {
            let pieces = exchange.sends.iter().chain(&exchange.receives);
            pieces.filter(|(_, p)| !p.is_dense()).map(|(_, p)| room(p.bytes())).sum()
        };
        let combined = summands.len() * room(each);
        // The second exchange begins when the first has ended on the stream.
        let bytes = combined + staged(&steps.first).max(staged(&steps.second));
        let staging = self.staging(bytes)?;
        let incoming: Vec<(usize, Address)> = (summands.iter().enumerate())
            .map(|(i, &place)| (place, staging + (i * room(each)) as Address))
            .collect();
        // SAFETY: pieces lie in the buffers, as the caller says, or in the staging memory, which only this
        // stream uses; steps follow each other there.
        unsafe {
            let free = staging + combined as Address;
            self.exchange(&steps.first, buffers, free, (&incoming, each))?;
            for &[from, to] in &steps.own {
                self.copy(buffers, from, to)?;
            }
            if let Some([own, to]) = steps.combined {
                self.combine(call, buffers, [own, to], &incoming)?;
            }
            self.exchange(&steps.second, buffers, free, (&[], 0))?;
        }
        self.marks.end.record(&self.stream)?;
        Ok(steps.moved(self.places, self.me))
    }

    /// What is issued on the engine's stream from now on comes after all calls of this line.
    pub(super) fn end(&self, engine: &Stream) -> Result<(), CudaError> {
        self.device.enter()?;
        marks::wait_for(engine, self.marks.end.number())
    }

    /// Ends what hangs because another rank has failed.
    pub(super) fn abort(&mut self) {
        if !self.comm.is_null() && self.device.enter().is_ok() {
            // SAFETY: the communicator is this value's own, and is not used again.
            unsafe { (self.table.ncclCommAbort)(self.comm) };
            self.comm = null_mut();
        }
    }

    /// Sends and receives at the same time; pieces that are not one run of bytes go through the staging memory
    /// from `free` on. `incoming` are other ranks' pieces of so many bytes, and where they go.
    ///
    /// # Safety
    /// All pieces are this call's to use, in the order of the stream.
    pub(super) unsafe fn exchange(
        &mut self,
        exchange: &Exchange,
        buffers: Buffers,
        mut free: Address,
        (incoming, each): (&[(usize, Address)], usize),
    ) -> Result<(), CudaError> {
        let mut take = |bytes: usize| {
            let at = free;
            free += room(bytes) as Address;
            at
        };
        let (mut sends, mut receives, mut later) = (Vec::new(), Vec::new(), Vec::new());
        for (peer, piece) in &exchange.sends {
            let at = match piece.is_dense() {
                true => address(buffers, piece),
                false => {
                    let at = take(piece.bytes());
                    // SAFETY: the caller's; the staging memory is large enough.
                    unsafe { self.moved(rows(buffers, piece), packed(at, piece), piece.shape)? };
                    at
                }
            };
            sends.push((*peer, at, piece.bytes()));
        }
        for (peer, piece) in &exchange.receives {
            let at = match piece.is_dense() {
                true => address(buffers, piece),
                false => {
                    let at = take(piece.bytes());
                    later.push((packed(at, piece), rows(buffers, piece), piece.shape));
                    at
                }
            };
            receives.push((*peer, at, piece.bytes()));
        }
        receives.extend(incoming.iter().map(|&(peer, at)| (peer, at, each)));
        if sends.len() + receives.len() > 0 {
            // SAFETY: the caller's.
            unsafe { self.grouped(&sends, &receives)? };
        }
        for (from, to, shape) in later {
            // SAFETY: as above; what was received is packed.
            unsafe { self.moved(from, to, shape)? };
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Line::exchange`]: peer, address and bytes of everything.
    unsafe fn grouped(
        &self,
        sends: &[(usize, Address, usize)],
        receives: &[(usize, Address, usize)],
    ) -> Result<(), CudaError> {
        let (table, comm, stream) = (self.table, self.comm, self.stream.handle());
        // SAFETY: the communicator and the stream are valid; memory is the caller's to give. A group that
        // was begun is ended, whatever its calls say.
        unsafe {
            check("ncclGroupStart", (table.ncclGroupStart)())?;
            let mut said = Ok(());
            for &(peer, at, bytes) in sends {
                let status = (table.ncclSend)(at, bytes, BYTES, peer as i32, comm, stream);
                said = said.and(check("ncclSend", status));
            }
            for &(peer, at, bytes) in receives {
                let status = (table.ncclRecv)(at, bytes, BYTES, peer as i32, comm, stream);
                said = said.and(check("ncclRecv", status));
            }
            said.and(check("ncclGroupEnd", (table.ncclGroupEnd)()))
        }
    }

    /// # Safety
    /// Both pieces are this call's to use, in the order of the stream.
    unsafe fn copy(&mut self, buffers: Buffers, from: Piece, to: Piece) -> Result<(), CudaError> {
        // In place.
        if address(buffers, &from) == address(buffers, &to) || from.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: the caller's; the two do not overlap, as the rules of calls say.
        unsafe { self.moved(rows(buffers, &from), rows(buffers, &to), from.shape) }
    }

    /// Combines pieces in the order of the group.
    ///
    /// # Safety
    /// As for [`Line::exchange`], after it.
    unsafe fn combine(
        &mut self,
        call: &Call<'_>,
        buffers: Buffers,
        [own, to]: [Piece; 2],
        incoming: &[(usize, Address)],
    ) -> Result<(), CudaError> {
        let (size, [outer, rows_of, len]) = (call.dtype.size(), own.shape);
        let Some(op) = call.op.reduction().filter(|_| own.bytes() > 0) else { return Ok(()) };
        let mut others = incoming.iter();
        let sources: Vec<StridedRows> = (0..self.places)
            .map(|place| match place == self.me {
                true => rows(buffers, &own),
                false => packed(others.next().map_or(0, |(_, at)| *at), &own),
            })
            .collect();
        let how = Combining { dtype: call.dtype, op, accumulate: call.accumulate };
        let shape = [outer, rows_of, len / size];
        let target = [rows(buffers, &to)];
        // SAFETY: the caller's; every source has the shape of the own piece.
        unsafe { self.mover.reduce(how, shape, &sources, &target) }.map_err(failed)
    }

    /// # Safety
    /// As for [`DeviceMover::copy`].
    unsafe fn moved(
        &mut self,
        from: StridedRows,
        to: StridedRows,
        shape: [usize; 3],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.mover.copy(shape, from, to) }.map_err(failed)
    }

    /// Memory of at least so many bytes, which only this stream uses.
    fn staging(&mut self, bytes: usize) -> Result<Address, CudaError> {
        if bytes > self.staging.as_ref().map_or(0, DeviceMemory::bytes) {
            // Freeing waits for what still uses it.
            self.staging = None;
            self.staging = Some(DeviceMemory::new(&self.device, bytes)?);
        }
        Ok(self.staging.as_ref().map_or(0, DeviceMemory::address))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.marks.give_back();
        if !self.comm.is_null() && self.device.enter().is_ok() {
            // SAFETY: the communicator is this value's own; its stream is waited for first.
            unsafe {
                (self.stream.driver().cuStreamSynchronize)(self.stream.handle());
                (self.table.ncclCommDestroy)(self.comm);
            }
        }
    }
}

/// A new id, by which the members of one group find each other.
pub(super) fn new_id() -> Result<UniqueId, CudaError> {
    let (table, mut id) = (Nccl::get()?, UniqueId([0; 128]));
    // SAFETY: the out-pointer is valid.
    check("ncclGetUniqueId", unsafe { (table.ncclGetUniqueId)(&mut id) })?;
    Ok(id)
}

fn room(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

fn address(buffers: Buffers, piece: &Piece) -> Address {
    let base = match piece.side {
        Side::Given => buffers.given,
        Side::Wanted => buffers.wanted,
    };
    base + piece.start as Address
}

/// A piece where it lies in its buffer.
fn rows(buffers: Buffers, piece: &Piece) -> StridedRows {
    let [outer, row] = piece.strides;
    StridedRows { base: address(buffers, piece) as *mut u8, outer, row }
}

/// The same as one run of bytes.
fn packed(at: Address, piece: &Piece) -> StridedRows {
    let [_, rows, len] = piece.shape;
    StridedRows { base: at as *mut u8, outer: rows * len, row: len }
}

fn failed(why: String) -> CudaError {
    CudaError::Call { function: "moving what ranks exchange", why }
}

fn check(function: &'static str, status: i32) -> Result<(), CudaError> {
    let said = match status {
        0 => return Ok(()),
        1 => "a call of CUDA failed",
        2 => "the system refused something: a socket, or memory that processes share",
        3 => "an error inside of NCCL",
        4 | 5 => "NCCL refuses it: two ranks may not share a GPU",
        6 => "another rank has failed",
        _ => "an unknown error",
    };
    let why = format!("{said} (status {status}); NCCL_DEBUG=WARN prints more");
    Err(CudaError::Call { function, why })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use std::io::Write;

    use super::*;

    /// NCCL refuses two ranks on one GPU, so a single one sends to itself, in rows that are packed.
    #[test]
    fn a_rank_reaches_itself_through_nccl() {
        let found = Device::first().and_then(|device| Nccl::get().map(|_| device));
        let device = match found {
            Ok(device) => device,
            Err(why) => {
                let text = "SKIPPED a_rank_reaches_itself_through_nccl";
                let _ = writeln!(std::io::stderr(), "{text}: {why}");
                return;
            }
        };
        let stream = Stream::new(&device).unwrap();
        let mut line = Line::new(&device, new_id().unwrap(), [1, 0]).unwrap();
        let memory = DeviceMemory::new(&device, 1 << 12).unwrap();
        let bytes: Vec<u8> = (0..1 << 12).map(|i| (i % 251) as u8).collect();
        // SAFETY: the memory is as long, and nothing else uses it.
        unsafe { stream.upload(memory.address(), &bytes) }.unwrap();
        stream.wait().unwrap();
        let piece =
            |side, start, row| Piece { side, start, shape: [2, 3, 40], strides: [3 * row, row] };
        let (from, to) = (piece(Side::Given, 16, 64), piece(Side::Wanted, 2048, 40));
        let exchange = Exchange { sends: vec![(0, from)], receives: vec![(0, to)] };
        let buffers = Buffers { given: memory.address(), wanted: memory.address() };
        let free = line.staging(room(from.bytes())).unwrap();
        // SAFETY: both pieces lie in the memory and do not overlap.
        unsafe { line.exchange(&exchange, buffers, free, (&[], 0)) }.unwrap();
        line.stream.wait().unwrap();
        let mut found = vec![0; 1 << 12];
        // SAFETY: the memory is as long, and nothing writes it.
        unsafe { stream.download(memory.address(), &mut found) }.unwrap();
        let rows = (0..6).flat_map(|row| &bytes[16 + 64 * row..][..40]);
        assert!(found[2048..2048 + 240].iter().eq(rows));
    }
}
