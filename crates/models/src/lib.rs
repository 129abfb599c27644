//! Models as segments of typed programs, their initial weights, and Hugging Face weights in and out.
//!
//! An [`Architecture`] is a few sizes from which a model can be built: [`Llama`], [`Gpt`],
//! [`T5`], [`Mlp`] and [`Cnn`] are one page of tensor code each. Build your own models with a [`Chain`].
#![forbid(unsafe_code)]

mod architecture;
mod chain;
mod check;
mod cnn;
mod distance;
mod experts;
mod gpt;
pub mod hf;
mod init;
mod language;
mod llama;
mod local;
mod mlp;
mod t5;

pub use architecture::{Architecture, BatchShape, Purpose, port};
pub use chain::Chain;
pub use cnn::Cnn;
pub use experts::{AuxScope, Capacity, Experts, LateExperts, Router};
pub use gpt::Gpt;
pub use init::initial_values;
pub use llama::Llama;
pub use local::{LocalForm, LocalTensor};
pub use mlp::{Loss, Mlp};
pub use t5::T5;
