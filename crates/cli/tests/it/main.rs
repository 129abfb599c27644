//! Integration tests of the command, by running it.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod benchmarks;
#[cfg(target_os = "linux")]
mod chaos;
mod command;
mod composed;
#[cfg(target_os = "linux")]
mod damaged;
mod documents;
mod evaluating;
mod explaining;
#[cfg(target_os = "linux")]
mod gpus;
#[cfg(target_os = "linux")]
mod hosts;
#[cfg(target_os = "linux")]
mod images;
mod inputs;
#[cfg(target_os = "linux")]
mod interruptions;
#[cfg(target_os = "linux")]
mod limits;
mod long_context;
#[cfg(target_os = "linux")]
mod lost_hosts;
#[cfg(target_os = "linux")]
mod mpi;
#[cfg(target_os = "linux")]
mod namespaces;
mod newcomer;
#[cfg(target_os = "linux")]
mod outputs;
#[cfg(target_os = "linux")]
mod own_program;
mod pictures;
mod pipelines;
mod planning;
#[cfg(target_os = "linux")]
mod processes;
#[cfg(target_os = "linux")]
mod recovering;
mod refusals;
#[cfg(target_os = "linux")]
mod rescues;
#[cfg(target_os = "linux")]
mod resuming;
mod resuming_shapes;
mod scheduling;
mod tracing;
mod training;
