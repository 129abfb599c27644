//! Integration tests of the training crate.
#![allow(missing_docs)]

mod config_errors;
mod config_keys;
mod config_sources;
mod run_folders;
