#![forbid(unsafe_code)]
pub mod hf;
