//! Executes scripts on an engine.
//!
//! The [`Executor`] turns a script's actions into calls, each with the calls that it must wait for,
//! and gives all of them to the engine as one step, which then runs many times. It knows no
//! strategy: all decisions were made when the script was built.
#![forbid(unsafe_code)]

mod bind;
mod executor;
mod observe;
mod trace;

pub use executor::{Executor, RuntimeError, ScriptId};
pub use observe::Observed;
pub use trace::TimedAction;
