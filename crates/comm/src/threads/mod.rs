//! The transport whose ranks are threads of one process: everybody reads everybody's memory.

mod board;
mod endpoint;
mod idle;
mod launcher;
mod movement;
mod progress;
mod world;

pub use launcher::Threads;
pub use world::{Options, Waiting};
