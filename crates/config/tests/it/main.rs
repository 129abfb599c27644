//! What a configuration accepts, refuses and says.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod keys;
mod refusals;
mod shrinking;
mod sources;
