//! Typed programs: what is computed, on which mesh, in which layout.
#![forbid(unsafe_code)]

pub mod dtype;
pub mod random;

pub use dtype::DType;
