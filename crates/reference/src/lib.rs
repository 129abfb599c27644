//! The reference interpreter: a program on whole tensors, executed naively and readably.
//!
//! All other executions are tested against it, so it shares no code with any engine and is never
//! optimised. Numbers are computed in `f64`, and the results of every instruction are rounded to
//! their element type. Layouts are ignored: every value is the global one, on which a collective
//! does nothing.
#![forbid(unsafe_code)]

mod engine;
mod error;
mod index;
mod interpret;
mod ops;
mod tensor;

pub use engine::{ReferenceEngine, ReferenceKernel};
pub use error::ReferenceError;
pub use interpret::{run, run_values};
pub use tensor::{RefTensor, TensorData};
