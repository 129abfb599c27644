//! The interpreter against numbers known from elsewhere, and compound ops against the ops they
//! stand for; gradients are tested with reverse mode, in the autodiff crate.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod engine;
mod equivalence;
mod errors;
mod known;
mod known_fused_ops;
mod support;
