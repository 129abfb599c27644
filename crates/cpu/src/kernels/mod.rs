//! One thread's share of each operation: plain functions on slices, without threads, locks or heap.

pub mod attention;
pub mod cross_entropy;
pub mod gemm;
pub mod matrix;
mod row;
#[cfg(test)]
mod testing;
pub mod transpose;
