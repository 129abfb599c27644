//! The CUDA engine against the reference interpreter. What needs a GPU says so where there is none.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod copies;
mod drawn;
mod folds;
mod gpu;
mod grouped;
mod ids;
mod large;
mod layouts;
mod ops;
mod partitioned;
mod sources;
mod suite;
