//! Executes scripts on an engine.
//!
//! The [`Executor`] issues a script's actions in order, each after the events that its buffers and
//! edges ask for. It knows no strategy by name: what is done was decided when the script was made.
#![forbid(unsafe_code)]

mod executor;
mod observe;
mod trace;

pub use executor::{Executor, RuntimeError, ScriptId};
pub use observe::Observed;
pub use trace::TimedAction;
