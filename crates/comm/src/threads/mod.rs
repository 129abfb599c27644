//! The transport whose ranks are threads of one process: everybody reads everybody's memory.

mod board;
mod endpoint;
mod idle;
mod matching;
mod movement;
mod progress;
mod world;

pub use endpoint::Endpoint;
pub(crate) use world::Stopper;
pub use world::{Options, Waiting, World};
