//! The checker against broken scripts, the planner against brute force, edges between devices
//! against global tensors, and gradient accumulation against one large batch.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod accumulation;
mod broken;
mod edges;
mod pipelined;
mod planner;
mod random;
mod tiers;
mod together;
