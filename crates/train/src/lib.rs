//! Everything around the training step: configuration, learning-rate schedules, metrics and runs.
//!
//! [`session`] holds the step itself, as a script on an engine; [`train()`] goes from a
//! configuration to a folder of results.
#![forbid(unsafe_code)]

pub mod bench;
pub mod config;
pub mod corpus;
pub mod error;
pub mod eval;
pub mod explain;
pub mod floor;
mod folders;
pub mod host;
pub mod metrics;
pub mod network;
pub mod output;
pub mod pipeline;
mod predict;
pub mod products;
pub mod progress;
mod relief;
mod replay;
mod report;
pub mod rundir;
pub mod saved;
pub mod schedule;
pub mod session;
pub mod steps;
pub mod trace;
mod train;
pub mod verify;
pub mod writable;

pub use train::{Output, train};
