//! One thread's share of each operation: plain functions on slices, without threads, locks or heap.

pub mod attention;
pub mod cast;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
mod erf;
pub mod factors;
pub mod gemm;
pub mod grouped;
pub mod halves;
mod inlined;
mod lanes;
pub mod lowered;
pub mod matrix;
pub mod movement;
pub mod norm;
pub mod optim;
pub mod patches;
pub mod reduce;
pub mod rotary;
pub mod routing;
mod row;
pub mod softmax;
#[cfg(test)]
pub(crate) mod testing;
pub mod transpose;
