//! The coordinator beside a job that only exists in memory.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod decisions;
mod silence;
mod simulation;
