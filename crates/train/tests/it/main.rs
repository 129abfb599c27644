//! Integration tests of the training crate.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking, in its helpers too")]

mod config_errors;
mod config_keys;
mod config_sources;
mod run_folders;
mod session;
