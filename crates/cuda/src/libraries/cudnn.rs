//! Attention: cuDNN's backend interface, in which everything is a descriptor with numbered attributes.

use std::ffi::c_void;

use super::{Handle, library};

library! {
    /// Functions of cuDNN.
    Cudnn: "cuDNN" in &["libcudnn.so.9", "libcudnn.so"],
        "cuDNN 9 (package cudnn9-cuda-13, or nvidia-cudnn-cu13 of PyPI)";
    fn cudnnCreate(*mut Handle);
    fn cudnnDestroy(Handle);
    fn cudnnSetStream(Handle, Handle);
    fn cudnnGetProperty(i32, *mut i32);
    fn cudnnGetLastErrorString(*mut u8, usize);
    fn cudnnBackendCreateDescriptor(i32, *mut Handle);
    fn cudnnBackendDestroyDescriptor(Handle);
    fn cudnnBackendSetAttribute(Handle, i32, i32, i64, *const c_void);
    fn cudnnBackendGetAttribute(Handle, i32, i32, i64, *mut i64, *mut c_void);
    fn cudnnBackendFinalize(Handle);
    fn cudnnBackendExecute(Handle, Handle, Handle);
}
