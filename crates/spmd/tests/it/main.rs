//! The partitioner on the segments of real models.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod automatic;
mod local;
mod models;
mod patterns;
mod planted;
mod random;
mod support;
