//! The CPU engine and its kernels.

pub mod element;
pub mod kernels;
pub mod pool;
