//! What the verifier refuses, and that programs print and parse back.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod axes;
mod builder;
mod every;
mod gradient;
mod mangle;
mod names;
mod text;
mod verifier;
