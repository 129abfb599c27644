//! What users write, from the crates below, with an example each.

mod data;
mod models;
mod pipelines;
mod strategies;
mod training;

pub use data::*;
pub use models::*;
pub use pipelines::*;
pub use strategies::*;
pub use training::*;
