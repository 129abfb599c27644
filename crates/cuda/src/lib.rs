//! The CUDA engine: programs as kernels on a GPU.
//!
//! Nothing of CUDA is needed to build this crate. The driver, the compiler of kernels and the library
//! of matrix products are opened when an engine is made ([`Device::first`]); what is missing is an
//! error that lists the files that were looked for. Kernels are CUDA C: templates in `kernels`, and
//! groups of elementwise ops that are generated from the program. They are compiled when a program
//! is, and kept on disk.

mod cache;
mod choice;
mod compiler;
mod device;
mod engine;
mod error;
mod folds;
mod fused_attention;
mod generate;
mod kernels;
mod libraries;
mod piece;
mod products;
mod ranks;
mod requirements;
mod sensors;
mod tasks;

use std::sync::Arc;

pub use device::Device;
pub use engine::{CudaEngine, CudaKernel, CudaStep};
pub use error::CudaError;
pub use ranks::GpuLink;
pub use requirements::CudaRequirements;
pub use sensors::GpuNow;
pub use tasks::WITHOUT_KERNEL;

/// Why attention runs on the engine's own kernels, which are slower, if cuDNN is missing.
pub fn without_attention_library() -> Option<CudaError> {
    libraries::Cudnn::get().err()
}

/// The GPU, if it and all libraries that an engine needs are there: to be asked before a run.
pub fn check() -> Result<Arc<Device>, CudaError> {
    let device = Device::first()?;
    libraries::CublasLt::get()?;
    Ok(device)
}
