//! Reverse-mode differentiation of the logical program of a segment.
//!
//! [`joint()`] appends the backward of a forward program to it and tags each instruction F, B or W.
//! [`slice()`] divides that joint graph into the programs that scripts run:
//!
//! | program | what it computes | used when |
//! |---|---|---|
//! | F | outputs, and the residuals that the backward needs | always |
//! | B | gradients of inputs: what the previous stage waits for | the schedule splits the backward |
//! | W | gradients of weights, from values kept by F and B; reads no weights | it splits the backward |
//! | BW | both, unsplit | the schedule does not split |
//! | FBW | everything at once, so that nothing is kept | the backward comes right after |
//!
//! BW is B followed by W, instruction by instruction, so the numbers are the same. Recomputation
//! moves residuals from "kept by F" to "recomputed in B": clones of F's own instructions, so the
//! bits are the same too.
#![forbid(unsafe_code)]

mod joint;
mod slice;

pub use joint::{Joint, LossSeed, joint, joint_from};
pub use slice::{Phases, Recompute, slice};
