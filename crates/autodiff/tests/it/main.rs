//! Gradients against central differences, the phases against each other, and what they keep
//! against closed forms.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod check;
mod fused_ops;
mod ops;
mod phases;
mod recompute;
mod residuals;
mod segments;
mod slope;
mod support;
mod windows;
