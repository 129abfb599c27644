//! Everything around the training step: configuration, learning-rate schedules, metrics and runs.
#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod metrics;
pub mod progress;
pub mod rundir;
pub mod schedule;
