//! The `phalanx` command.
#![forbid(unsafe_code)]
fn main() {}
