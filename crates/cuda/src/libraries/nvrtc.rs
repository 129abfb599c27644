//! The compiler of kernels.

use std::ffi::c_char;

use super::{Handle, library};

library! {
    /// Functions of NVRTC.
    Nvrtc: "NVRTC" in &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        "the CUDA toolkit (package cuda-nvrtc, or nvidia-cuda-nvrtc of PyPI)";
    fn nvrtcVersion(*mut i32, *mut i32);
    fn nvrtcCreateProgram(
        *mut Handle, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char,
    );
    fn nvrtcAddNameExpression(Handle, *const c_char);
    fn nvrtcCompileProgram(Handle, i32, *const *const c_char);
    fn nvrtcGetLoweredName(Handle, *const c_char, *mut *const c_char);
    fn nvrtcGetProgramLogSize(Handle, *mut usize);
    fn nvrtcGetProgramLog(Handle, *mut u8);
    fn nvrtcGetCUBINSize(Handle, *mut usize);
    fn nvrtcGetCUBIN(Handle, *mut u8);
    fn nvrtcDestroyProgram(*mut Handle);
}
