//! The CPU engine: kernels over slices and the threads that run them.

pub mod pool;
