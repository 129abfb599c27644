//! Tests of the transport of threads from outside.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod busy;
mod conformance;
