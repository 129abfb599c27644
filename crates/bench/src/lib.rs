//! How fast things are, and how fast they could be: steps beside the floor of their matrix products,
//! collectives, partitioning.
#![forbid(unsafe_code)]

mod collectives;
pub mod floor;
mod partition;
mod step;
mod transport;

pub use collectives::{CollectiveRow, collectives};
pub use partition::{PartitionBench, partition};
pub use step::{StepBench, random_batch, step};
