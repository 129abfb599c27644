//! Inspection of plans and runs: what each rank does and holds, changes that make a plan fit into
//! memory, timelines, and the check that many ranks train like one rank.
#![forbid(unsafe_code)]

mod alone;
pub mod explain;
pub mod memory_advice;
pub mod trace;
pub mod verify;
pub mod writable;
