//! Reverse mode on the logical program of a segment.
//!
//! [`joint()`] appends the backward of a forward program to it and tags each instruction F, B or W.
//! [`slice()`] cuts that joint graph into the programs that scripts run:
//!
//! | program | what it computes | used when |
//! |---|---|---|
//! | F | outputs, and the residuals that the backward needs | always |
//! | B | gradients of inputs: what the previous stage waits for | the schedule splits the backward |
//! | W | gradients of weights, from what B and F left; reads no weights | the schedule splits it |
//! | BW | both, unsplit | the schedule does not split |
//! | FBW | everything at once, so that nothing is kept | the backward follows at once |
//!
//! BW is B followed by W, instruction by instruction, so the numbers are the same. Recomputation
//! moves residuals from "kept by F" to "made again in B": clones of F's own instructions, so the
//! bits are the same too.
#![forbid(unsafe_code)]

mod joint;
mod slice;

pub use joint::{Joint, joint};
pub use slice::{Phases, Recompute, slice};
