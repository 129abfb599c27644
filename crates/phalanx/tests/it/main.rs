//! Integration tests of the library.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod documented;
mod examples;
mod from_pytorch;
mod processes;
mod refusals;
mod trainer;
mod training;
