//! What instructions cost: work, hardware, and seconds from both.
//!
//! The [`Work`] of an instruction is what one rank does for it: FLOPs, bytes read and written in
//! its own memory, and a [`Transfer`] between ranks. It follows from the types alone. The
//! [`Hardware`] is a few numbers. Seconds are a function of the two, in closed form. All code that
//! compares things by time uses this crate: the partitioner, and the advice if a plan does not fit
//! into memory.
#![forbid(unsafe_code)]

mod hardware;
mod program;
mod work;

pub use hardware::{Hardware, Peaks};
pub use phalanx_ir::ops::Product;
pub use program::{reductions, seconds};
pub use work::{Transfer, Work};
