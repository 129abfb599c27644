//! What the tests of several crates share.
//!
//! [`Rig`] trains a model through a script on any engine, with nothing of the user's trainer around
//! it (also in unusual orders: [`schedules`]), so that engines, scripts and models are tested against the same numbers in the same way.
//! [`suite`] is what every engine must pass; [`Errors`] is the one measure by which results are
//! compared. [`ranks`] runs a partitioned program on ranks that are threads, and [`layouts`] draws
//! such programs. No crate that users run depends on
//! this one.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test that fails should stop")]

mod compile;
mod errors;
pub mod layouts;
pub mod ranks;
mod rig;
pub mod schedules;
mod small;
pub mod suite;

pub use compile::{compile, optimise};
pub use errors::{Errors, worst};
pub use rig::{Batch, Rig, Setup};
pub use small::{VOCAB, gpt, llama, mlp, tiny};
