//! Runs: training, evaluation, the run folder, metrics and reports.
//!
//! `phalanx-session` holds the step itself, as a script on an engine; [`train()`] goes from a
//! configuration to a folder of results.
#![forbid(unsafe_code)]

mod checkpoints;
mod closing;
mod convert;
pub mod doctor;
pub mod eval;
mod export;
pub mod metrics;
pub mod output;
pub mod progress;
mod replay;
mod report;
mod requeued;
mod resume;
pub mod rundir;
pub mod saved;
mod start;
pub mod steps;
mod times;
mod train;

pub use checkpoints::{CHECKPOINTS, Checkpoints, CommittedCheckpoint, RunFacts, Saving};
pub use convert::CheckpointWeights;
pub use resume::Resume;
pub use times::LedgerLine;
pub use train::{Output, resume, train};
