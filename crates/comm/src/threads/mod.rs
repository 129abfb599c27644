//! The transport whose ranks are threads of one process: every rank reads the memory of all others.

mod board;
mod endpoint;
mod idle;
mod launcher;
mod movement;
mod progress;
mod world;

pub use launcher::Threads;
pub use world::{Options, Waiting};
