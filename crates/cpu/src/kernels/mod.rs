//! One thread's share of each operation: plain functions on slices, without threads, locks or heap.

pub mod attention;
pub mod cross_entropy;
pub mod gemm;
pub mod matrix;
mod row;
pub mod transpose;
pub mod cast;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
mod erf;
mod inlined;
mod lanes;
pub mod movement;
pub mod norm;
pub mod optim;
pub mod reduce;
pub mod rotary;
#[cfg(test)]
mod testing;
