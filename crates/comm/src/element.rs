//! Element types that typed slices may have.

use half::{bf16, f16};
use phalanx_ir::DType;

/// A type that slices of data are made of.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its name in programs.
    const DTYPE: DType;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
