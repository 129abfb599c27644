//! Runs: training, evaluation, the run folder, metrics and reports.
//!
//! `phalanx-session` holds the step itself, as a script on an engine; [`train()`] goes from a
//! configuration to a folder of results.
#![forbid(unsafe_code)]

mod checkpoints;
mod convert;
pub mod eval;
pub mod metrics;
pub mod output;
pub mod progress;
mod replay;
mod report;
mod resume;
pub mod rundir;
pub mod saved;
pub mod steps;
mod train;

pub use checkpoints::CHECKPOINTS;
pub use convert::CheckpointWeights;
pub use resume::Resume;
pub use train::{Output, resume, train};
