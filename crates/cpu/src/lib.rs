//! The CPU engine and its kernels.
//!
//! [`CpuEngine`] compiles a program to tasks (`tasks/`), one for each instruction: where operands
//! lie, how the work is divided among threads, which bytes each thread touches. Tasks call kernels
//! ([`kernels`]): plain functions that do one thread's share on slices. A fixed [`pool`] of threads
//! runs a whole program between two synchronisations with the caller, with barriers only where a
//! thread reads what another wrote.

pub mod element;
mod engine;
mod half_element;
pub mod kernels;
pub mod pool;
pub mod products;
mod requirements;
mod tasks;

pub use engine::{CpuEngine, Kernel, MAX_WORKERS};
pub use requirements::CpuRequirements;
