//! The CPU engine against the reference interpreter, on any number of threads.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod attend;
mod grouped;
mod harness;
mod lanes;
mod ops;
mod partitioned;
mod planted;
mod ranks;
mod rows;
mod segments;
mod shared_gradient;
mod sources;
mod suite;
mod updates;
mod windows;
