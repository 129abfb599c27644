//! Tests of the transports from outside.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod attached;
mod busy;
mod conformance;
mod environments;
mod manifests;
mod mpi;
mod priority;
mod processes;
mod queued;
mod same;
mod shared;
mod strangers;
mod streams;
mod suite;
