//! Each system for itself (its bytes, its memory, the order of what it does) and in combination.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod bits;
mod composition;
mod context;
mod ddp;
mod fsdp;
mod planted;
mod support;
mod tensor;
mod zero;
