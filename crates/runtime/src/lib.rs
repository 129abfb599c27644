//! Executes scripts on an engine.
//!
//! The [`Executor`] makes calls of a script's actions, each after those that its buffers and edges ask
//! for, and hands all of them to the engine as one step, which it then runs again and again. It knows no strategy by name: what is done was decided when the script was made.
#![forbid(unsafe_code)]

mod bind;
mod executor;
mod observe;
mod trace;

pub use executor::{Executor, RuntimeError, ScriptId};
pub use observe::Observed;
pub use trace::TimedAction;
