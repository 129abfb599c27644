//! Looking at a plan before it runs, and at what ran: what each rank does and holds, what makes a plan
//! fit into memory, timelines, and the proof that many ranks train like one.
#![forbid(unsafe_code)]

pub mod explain;
pub mod memory_advice;
pub mod trace;
pub mod verify;
pub mod writable;
