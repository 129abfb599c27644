//! Architectures against closed forms and each other's lists of parameters; Hugging Face folders in and
//! out, against files and numbers that `transformers` made.

// A helper that cannot read a fixture should stop its test, like the test itself.
#![allow(clippy::unwrap_used)]

mod architectures;
mod cnn;
mod config;
mod damage;
mod exchange;
mod fixtures;
mod initial;
mod naive;
mod optimizers;
mod oracle;
mod params;
mod programs;
mod ranges;
mod refusals;
mod t5;
mod windows;
