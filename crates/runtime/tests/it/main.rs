//! The executor on an engine that is as late as it may be.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod average;
mod expresses;
mod forgetful;
mod late;
mod members;
mod memory;
mod remote;
mod trace;
