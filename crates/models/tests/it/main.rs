//! Hugging Face folders in and out, against files and numbers that `transformers` made.

mod config;
mod damage;
mod exchange;
mod fixtures;
mod naive;
mod params;
