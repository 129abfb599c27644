//! Moves a GPU's memory between ranks that see it: threads that share the GPU, or processes of its host.

use std::sync::Arc;

use phalanx_call::MemoryKind;
use phalanx_comm::{CallNote, Combining, DeviceMover, Reached, ReduceOp, StridedRows};
use phalanx_ir::DType;

use super::mapped::Mapped;
use super::marks::{self, Marks};
use crate::device::{Device, DeviceMemory, Function, Grid, Stream};
use crate::engine::MEMORY;
use crate::error::CudaError;
use crate::kernels::{KernelSpec, Source, type_name};
use crate::libraries::{Address, IpcHandle, driver_call};
use crate::tasks::THREADS;

/// The most ranks of a group: so many places does the kernel take.
pub(super) const MOST_RANKS: usize = 64;

/// Moves memory for one rank, on its stream.
pub(crate) struct CudaMover {
    rank: u64,
    /// Whether other ranks are other processes.
    processes: bool,
    device: Arc<Device>,
    stream: Arc<Stream>,
    /// By slot.
    marks: Vec<Option<Marks>>,
    mapped: Mapped,
    /// The kernels that were used, by what they do.
    kernels: Vec<(Kind, Function)>,
    spare: Option<DeviceMemory>,
}

/// What a kernel of this file does, and with how many bytes or elements at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Move(usize),
    Combine(DType, ReduceOp, usize),
}

// Words of a note.
const PROCESS: usize = 0;
const RANK: usize = 1;
/// The addresses of both buffers, and of the memory that they lie in.
const SEND: usize = 2;
const RECEIVE: usize = 3;
const BASE: usize = 4;
/// The numbers of both marks in their process.
const BEGIN: usize = 5;
const END: usize = 6;
/// What another process opens the memory and both marks by, eight words each.
const OPENED: usize = 8;

impl CudaMover {
    pub(crate) fn new(
        rank: usize,
        processes: bool,
        device: &Arc<Device>,
        stream: &Arc<Stream>,
    ) -> Self {
        Self {
            rank: rank as u64,
            processes,
            device: device.clone(),
            stream: stream.clone(),
            marks: Vec::new(),
            mapped: Mapped::new(device),
            kernels: Vec::new(),
            spare: None,
        }
    }

    /// The marks of a slot.
    fn marks(&mut self, slot: u64) -> Result<Marks, CudaError> {
        let slot = slot as usize;
        if self.marks.len() <= slot {
            self.marks.resize(slot + 1, None);
        }
        if let Some(marks) = self.marks[slot] {
            return Ok(marks);
        }
        let marks = Marks::take(&self.device, self.processes)?;
        self.marks[slot] = Some(marks);
        Ok(marks)
    }

    /// The memory that buffers lie in: its first address, and what other processes open it by.
    fn shown(&self, send: Address, receive: Address) -> Result<(Address, IpcHandle), CudaError> {
        let driver = self.device.driver();
        let range = |of: Address| {
            let (mut base, mut bytes) = (0, 0);
            // SAFETY: the out-pointers are valid.
            unsafe { driver_call!(driver, cuMemGetAddressRange_v2(&mut base, &mut bytes, of)) }?;
            Ok(base)
        };
        let bases = [send, receive].map(|at| if at == 0 { Ok(0) } else { range(at) });
        let [first, second] = bases;
        let (first, second) = (first?, second?);
        if first != 0 && second != 0 && first != second {
            let why = "both buffers of a call must lie in one arena".to_owned();
            return Err(CudaError::Call { function: "sharing memory", why });
        }
        let (base, mut handle) = (first.max(second), IpcHandle([0; 8]));
        if base != 0 {
            // SAFETY: the out-pointer is valid, and the address is that of an allocation.
            unsafe { driver_call!(driver, cuIpcGetMemHandle(&mut handle, base)) }?;
        }
        Ok((base, handle))
    }

    fn note(&mut self, slot: u64, send: Address, receive: Address) -> Result<CallNote, CudaError> {
        self.device.enter()?;
        let marks = self.marks(slot)?;
        marks.begin.record(&self.stream)?;
        let mut note: CallNote = [0; 32];
        note[PROCESS] = u64::from(std::process::id());
        note[RANK] = self.rank;
        (note[SEND], note[RECEIVE]) = (send, receive);
        (note[BEGIN], note[END]) = (marks.begin.number(), marks.end.number());
        if let (Some(begin), Some(end)) = (marks.begin.ipc, marks.end.ipc) {
            let (base, memory) = self.shown(send, receive)?;
            note[BASE] = base;
            for (at, handle) in [memory, begin, end].into_iter().enumerate() {
                note[OPENED + 8 * at..][..8].copy_from_slice(&handle.0);
            }
        }
        Ok(note)
    }

    fn reached(&mut self, note: &CallNote) -> Result<Reached, CudaError> {
        if note[PROCESS] == u64::from(std::process::id()) {
            let (send, receive) = (pointer(note[SEND]), pointer(note[RECEIVE]));
            return Ok(Reached { send, receive, begin: note[BEGIN], end: note[END] });
        }
        self.device.enter()?;
        let handle = |at: usize| IpcHandle(std::array::from_fn(|i| note[OPENED + 8 * at + i]));
        let seen = |address: Address, here: Address| match address {
            0 => pointer(0),
            _ => pointer(here + (address - note[BASE])),
        };
        let here = if note[BASE] == 0 { 0 } else { self.mapped.arena(note[RANK], handle(0))? };
        Ok(Reached {
            send: seen(note[SEND], here),
            receive: seen(note[RECEIVE], here),
            begin: self.mapped.mark(handle(1))?,
            end: self.mapped.mark(handle(2))?,
        })
    }

    fn kernel(&mut self, kind: Kind) -> Result<Function, CudaError> {
        if let Some((_, known)) = self.kernels.iter().find(|(of, _)| *of == kind) {
            return Ok(*known);
        }
        let spec = kind.spec();
        let function = self.device.functions(&[&spec])?[0];
        self.kernels.push((kind, function));
        Ok(function)
    }

    /// Launches a kernel over rows of `len` of what it takes at once.
    ///
    /// # Safety
    /// As for [`Function::launch`]; the walk is added to the arguments at the place `walk`.
    unsafe fn over_rows(
        &mut self,
        kind: Kind,
        [outer, rows, len]: [usize; 3],
        before: &mut [*mut std::ffi::c_void],
        walk_at: usize,
    ) -> Result<(), CudaError> {
        let function = self.kernel(kind)?;
        let threads = THREADS as usize;
        let lanes = len.next_power_of_two().min(threads);
        let all = outer * rows;
        let most = 16 * self.device.processors() as usize;
        let x = all.div_ceil(threads / lanes).clamp(1, most);
        let y = len.div_ceil(lanes).clamp(1, (most / x).clamp(1, 65535));
        let mut walk = [all as i64, rows as i64, len as i64, lanes as i64];
        before[walk_at] = walk.as_mut_ptr().cast();
        let grid = Grid { blocks: [x as u32, y as u32, 1], threads: THREADS, shared: 0 };
        // SAFETY: the caller's; the walk lives until the call returns.
        unsafe { function.launch(&self.stream, grid, before) }
    }

    /// # Safety
    /// As for [`DeviceMover::copy`].
    unsafe fn copied(
        &mut self,
        [outer, rows, len]: [usize; 3],
        from: StridedRows,
        to: StridedRows,
    ) -> Result<(), CudaError> {
        self.device.enter()?;
        if outer * rows == 1 {
            // SAFETY: the caller's.
            return unsafe { self.stream.copy(from.base as Address, to.base as Address, len) };
        }
        let unit = unit([outer, rows, len], &[from, to], 16);
        let (mut from, mut to) = (words(from), words(to));
        let mut args = [from.as_mut_ptr().cast(), to.as_mut_ptr().cast(), std::ptr::null_mut()];
        // SAFETY: the arguments are those of `move_rows`; the rest is the caller's.
        unsafe { self.over_rows(Kind::Move(unit), [outer, rows, len / unit], &mut args, 2) }
    }

    /// # Safety
    /// As for [`DeviceMover::reduce`].
    unsafe fn reduced(
        &mut self,
        how: Combining,
        [outer, rows, len]: [usize; 3],
        sources: &[StridedRows],
        targets: &[StridedRows],
    ) -> Result<(), CudaError> {
        self.device.enter()?;
        if outer * rows * len == 0 {
            return Ok(());
        }
        if sources.len() > MOST_RANKS || targets.len() > MOST_RANKS {
            let why = format!("a group on one GPU has at most {MOST_RANKS} ranks");
            return Err(CudaError::Call { function: "combining ranks' elements", why });
        }
        let size = how.dtype.size();
        let shape = [outer, rows, len * size];
        let unit = unit(shape, sources, 16).min(unit(shape, targets, 16));
        let at_once = if unit == 16 { 16 / size } else { 1 };
        let mut places = [[[0i64; 3]; MOST_RANKS]; 2];
        for (places, given) in places.iter_mut().zip([sources, targets]) {
            for (place, rows) in places.iter_mut().zip(given) {
                *place = words(*rows);
            }
        }
        let [from, to] = &mut places;
        let mut counts = [sources.len() as i64, targets.len() as i64, i64::from(how.accumulate)];
        let [given, wanted, accumulate] = &mut counts;
        let mut args = [
            from.as_mut_ptr().cast(),
            to.as_mut_ptr().cast(),
            std::ptr::null_mut(),
            (given as *mut i64).cast(),
            (wanted as *mut i64).cast(),
            (accumulate as *mut i64).cast(),
        ];
        let kind = Kind::Combine(how.dtype, how.op, at_once);
        // SAFETY: the arguments are those of `combine`; the rest is the caller's.
        unsafe { self.over_rows(kind, [outer, rows, len / at_once], &mut args, 2) }
    }
}

impl DeviceMover for CudaMover {
    fn memory(&self) -> MemoryKind {
        MEMORY
    }

    fn announce(
        &mut self,
        slot: u64,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<CallNote, String> {
        self.note(slot, send as Address, receive as Address).map_err(text)
    }

    fn reach(&mut self, note: &CallNote) -> Result<Reached, String> {
        self.reached(note).map_err(text)
    }

    fn after(&mut self, mark: u64) -> Result<(), String> {
        self.device.enter().and_then(|()| marks::wait_for(&self.stream, mark)).map_err(text)
    }

    fn finished(&mut self, slot: u64) -> Result<(), String> {
        let marks = self.device.enter().and_then(|()| self.marks(slot));
        marks.and_then(|marks| marks.end.record(&self.stream)).map_err(text)
    }

    unsafe fn copy(
        &mut self,
        shape: [usize; 3],
        from: StridedRows,
        to: StridedRows,
    ) -> Result<(), String> {
        // SAFETY: the caller's promises are passed on.
        unsafe { self.copied(shape, from, to) }.map_err(text)
    }

    unsafe fn reduce(
        &mut self,
        how: Combining,
        shape: [usize; 3],
        sources: &[StridedRows],
        targets: &[StridedRows],
    ) -> Result<(), String> {
        // SAFETY: the caller's promises are passed on.
        unsafe { self.reduced(how, shape, sources, targets) }.map_err(text)
    }

    fn spare(&mut self) -> Result<*mut u8, String> {
        if self.spare.is_none() {
            self.spare = Some(DeviceMemory::new(&self.device, 64).map_err(text)?);
        }
        Ok(pointer(self.spare.as_ref().map_or(0, DeviceMemory::address)))
    }
}

impl Drop for CudaMover {
    fn drop(&mut self) {
        self.marks.drain(..).flatten().for_each(Marks::give_back);
    }
}

impl Kind {
    fn spec(self) -> KernelSpec {
        match self {
            Kind::Move(unit) => {
                let name = match unit {
                    16 => "Bytes16",
                    8 => "u64",
                    4 => "u32",
                    2 => "u16",
                    _ => "u8",
                };
                KernelSpec::of(Source::Ranks, "move_rows", &[name])
            }
            Kind::Combine(dtype, op, at_once) => {
                let op = match op {
                    ReduceOp::Sum => "Added",
                    ReduceOp::Max => "Largest",
                };
                let args = [type_name(dtype), op, &at_once.to_string()];
                KernelSpec::of(Source::Ranks, "combine", &args)
            }
        }
    }
}

/// All kernels of ranks.
#[cfg(test)]
pub(crate) fn kernels() -> Vec<KernelSpec> {
    let moves = [1, 2, 4, 8, 16].map(Kind::Move);
    let of = |dtype: DType| {
        let ops = [ReduceOp::Sum, ReduceOp::Max].into_iter();
        ops.flat_map(move |op| [1, 16 / dtype.size()].map(|n| Kind::Combine(dtype, op, n)))
    };
    let types = [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::I32];
    let sums = types.into_iter().flat_map(of);
    moves.into_iter().chain(sums).map(Kind::spec).collect()
}

/// The most bytes, a power of two up to `most`, that all rows and their distances are multiples of.
fn unit([outer, rows, len]: [usize; 3], places: &[StridedRows], most: usize) -> usize {
    let mut bits = len | most;
    for place in places {
        bits |= place.base as usize;
        bits |= if rows > 1 { place.row } else { 0 };
        bits |= if outer > 1 { place.outer } else { 0 };
    }
    1 << bits.trailing_zeros()
}

/// A place as kernels take it.
fn words(rows: StridedRows) -> [i64; 3] {
    [rows.base as i64, rows.outer as i64, rows.row as i64]
}

fn pointer(address: Address) -> *mut u8 {
    address as *mut u8
}

fn text(error: CudaError) -> String {
    error.to_string()
}
