//! Matrix products.

use std::ffi::c_void;

use super::{Address, Handle, library};

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heuristic {
    pub(crate) algorithm: [u64; 8],
    pub(crate) workspace: usize,
    pub(crate) state: i32,
    waves: f32,
    reserved: [i32; 4],
}

library! {
    /// Functions of cuBLASLt.
    CublasLt: "cuBLASLt" in &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        "the CUDA toolkit (package libcublas, or nvidia-cublas of PyPI)";
    fn cublasLtGetProperty(i32, *mut i32);
    fn cublasLtCreate(*mut Handle);
    fn cublasLtDestroy(Handle);
    fn cublasLtMatmulDescCreate(*mut Handle, i32, i32);
    fn cublasLtMatmulDescDestroy(Handle);
    fn cublasLtMatmulDescSetAttribute(Handle, i32, *const c_void, usize);
    fn cublasLtMatrixLayoutCreate(*mut Handle, i32, u64, u64, i64);
    fn cublasLtMatrixLayoutDestroy(Handle);
    fn cublasLtMatrixLayoutSetAttribute(Handle, i32, *const c_void, usize);
    fn cublasLtMatmulPreferenceCreate(*mut Handle);
    fn cublasLtMatmulPreferenceDestroy(Handle);
    fn cublasLtMatmulPreferenceSetAttribute(Handle, i32, *const c_void, usize);
    fn cublasLtMatmulAlgoGetHeuristic(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Heuristic, *mut i32,
    );
    fn cublasLtMatmul(
        Handle, Handle, *const c_void, Address, Handle, Address, Handle, *const c_void, Address,
        Handle, Address, Handle, *const c_void, Address, usize, Handle,
    );
}
