//! Memory that the processor cannot address: who moves it, and how calls of ranks follow each other there.
//!
//! Ranks that see the same memory of a device, as threads or as processes of one host, meet as they do for
//! the host's memory: the same boards, checks and errors. Only the moving differs. A rank issues it on a
//! queue of its device and goes on; so what ranks wait for are *marks* in queues, not the end of the work.
//! A call begins with a mark of each member, which says that its buffers are ready, and ends with another,
//! which says that the member's part of the call is done. The host only sees to it that a mark is in its
//! queue before another rank waits for it.

use phalanx_call::MemoryKind;
use phalanx_ir::DType;

use crate::call::ReduceOp;

/// What a rank tells the others about a call: how they reach its buffers and its marks.
pub type CallNote = [u64; 32];

/// Moves a device's memory for one rank. All errors are final.
pub trait DeviceMover: Send {
    /// The kind of memory.
    fn memory(&self) -> MemoryKind;

    /// Begins a call with these buffers: what was issued until now comes before it. A rank uses few numbers of
    /// `slot` again and again, once no other rank needs what was noted before. A buffer may be null.
    fn announce(
        &mut self,
        slot: u64,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<CallNote, String>;

    /// Another rank's call, as this rank sees it.
    fn reach(&mut self, note: &CallNote) -> Result<Reached, String>;

    /// What is issued from now on comes after this mark.
    fn after(&mut self, mark: u64) -> Result<(), String>;

    /// Marks the end of this rank's part of the call that it announced under `slot`.
    fn finished(&mut self, slot: u64) -> Result<(), String>;

    /// Copies `shape` bytes (groups of rows, rows, bytes of a row) from one place to another.
    ///
    /// # Safety
    /// Both places are valid for the shape, do not overlap, and are this call's to use once the marks
    /// that were waited for are reached.
    unsafe fn copy(
        &mut self,
        shape: [usize; 3],
        from: StridedRows,
        to: StridedRows,
    ) -> Result<(), String>;

    /// Combines elements of the sources in their order and writes the result to all targets. If `how`
    /// says so, the first target's elements are combined with it first. The bits are those of
    /// [`ReduceOp`]. A target may be a source.
    ///
    /// # Safety
    /// All places are valid for the shape in elements of the type, and are this call's to use once the
    /// marks that were waited for are reached.
    unsafe fn reduce(
        &mut self,
        how: Combining,
        shape: [usize; 3],
        sources: &[StridedRows],
        targets: &[StridedRows],
    ) -> Result<(), String>;

    /// 64 bytes of this rank's that hold nothing.
    fn spare(&mut self) -> Result<*mut u8, String>;
}

/// Another rank's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// What it gives.
    pub send: *mut u8,
    /// What it receives into.
    pub receive: *mut u8,
    /// The mark after which both are ready.
    pub begin: u64,
    /// The mark at the end of its part of the call.
    pub end: u64,
}

impl Reached {
    /// A call of which nothing is used.
    pub(crate) fn nothing() -> Self {
        Self { send: std::ptr::null_mut(), receive: std::ptr::null_mut(), begin: 0, end: 0 }
    }
}

/// Where the rows of a block lie; strides are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedRows {
    /// The first row.
    pub base: *mut u8,
    /// From one group of rows to the next.
    pub outer: usize,
    /// From one row to the next.
    pub row: usize,
}

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combining {
    /// Their type.
    pub dtype: DType,
    /// What is done with them.
    pub op: ReduceOp,
    /// Whether the result is combined with what the first target holds.
    pub accumulate: bool,
}
