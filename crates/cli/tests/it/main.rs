//! Integration tests of the command, by running it.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod benchmarks;
mod command;
mod documents;
mod evaluating;
mod explaining;
#[cfg(target_os = "linux")]
mod interruptions;
mod newcomer;
mod pictures;
mod pipelines;
mod refusals;
mod scheduling;
mod tracing;
mod training;
