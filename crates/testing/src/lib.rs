//! Shared code of the tests of several crates.
//!
//! [`Rig`] trains a model through a script on any engine, without the user's trainer (also in
//! unusual orders: [`schedules`]), so that engines, scripts and models are tested against the same
//! numbers in the same way. [`run_on_ranks`] executes a partitioned program on simulated ranks, and
//! [`threads`] on real ones, each with an engine; [`cases`] makes random ones and makes failures
//! smaller, [`checks`] compares them with the interpreter, and [`layouts`] makes those of one
//! instruction; [`instances`] has one of every op. [`suite`] is what every engine must pass, [`Wrapped`] an engine around another one,
//! [`Remote`] one on a thread whose memory the host cannot address; [`Errors`] is the one measure
//! by which results are compared. No crate that users run depends on this one.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test that fails should stop")]

pub mod cases;
pub mod checks;
mod compile;
mod errors;
pub mod instances;
pub mod layouts;
mod ranks;
mod remote;
mod rig;
mod ring_bugs;
pub mod schedules;
mod seeds;
mod small;
pub mod suite;
mod tensors;
pub mod threads;
mod typed;
mod wrapped;

pub use compile::{compile, optimise};
pub use errors::{Errors, worst};
pub use ranks::{Bug, run_on_ranks, run_with};
pub use remote::{Remote, RemoteKernel, RemoteStep};
pub use rig::{Rig, RigBatch, Setup};
pub use ring_bugs::RingBug;
pub use seeds::{Seeds, asked_seeds};
pub use small::{VOCAB, gpt, llama, mlp, tiny};
pub use tensors::{ids, normal, tensor};
pub use typed::in_type;
pub use wrapped::{Hook, Launch, NamedKernel, Wrapped};
