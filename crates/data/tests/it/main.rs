//! The data crate, as its users see it.

mod files;
mod images;
mod loader;
mod markov;
mod sampling;
mod scratch;
