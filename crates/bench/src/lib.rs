//! Benchmarks: training steps compared with the time of their matrix products alone, collectives,
//! partitioning.
#![forbid(unsafe_code)]

mod collectives;
pub mod floor;
mod gpu_step;
mod partition;
mod products;
mod step;
mod transport;

pub use collectives::{CollectiveRow, collectives};
pub use gpu_step::{GpuStepBench, gpu_step};
pub use partition::{PartitionBench, partition};
pub use products::{ProductBench, ProductRow, products};
pub use step::{StepBench, random_batch, step};
