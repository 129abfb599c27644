//! The interpreter against numbers known from elsewhere, gradients against central differences,
//! and compound ops against the ops they stand for.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod engine;
mod equivalence;
mod errors;
mod gradients;
mod gradients_fused_ops;
mod known;
mod known_fused_ops;
mod support;
