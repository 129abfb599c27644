//! Messages between GPUs: NCCL.

use super::{Address, Handle, library};

/// By which the ranks of a communicator find each other (`ncclUniqueId`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

library! {
    /// Functions of NCCL.
    Nccl: "NCCL" in &["libnccl.so.2", "libnccl.so"],
        "NCCL (package libnccl2, or nvidia-nccl-cu13 of PyPI)";
    fn ncclGetVersion(*mut i32);
    fn ncclGetUniqueId(*mut UniqueId);
    fn ncclCommInitRank(*mut Handle, i32, UniqueId, i32);
    fn ncclCommDestroy(Handle);
    fn ncclCommAbort(Handle);
    fn ncclGroupStart();
    fn ncclGroupEnd();
    fn ncclSend(Address, usize, i32, i32, Handle, Handle);
    fn ncclRecv(Address, usize, i32, i32, Handle, Handle);
}
