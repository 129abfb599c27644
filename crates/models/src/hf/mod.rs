//! Hugging Face model folders in and out, and the weight file of a run.
//!
//! A folder is a `config.json`, which becomes a [`ModelSpec`] of plain numbers, and one or more
//! `safetensors` files, whose tensors are renamed and turned into the layouts of this project
//! ([`names`]). Everything is checked against the specification before any weight is read: a folder
//! either loads completely or is refused with the file, the key or tensor, what was found and what
//! was expected. Nothing is guessed: a variant whose mathematics is not implemented is refused by
//! name. Weights are read in ranges, when they are asked for ([`Weights`]), and written one tensor
//! at a time.

mod config;
mod error;
mod file;
mod keys;
mod mixtral;
pub mod names;
mod params;
mod read;
mod spec;
mod t5;
mod tensor;
mod view;
mod weights;
mod write;

pub use config::{KeptKeys, config_text, parse_config, read_config};
pub use error::HfError;
pub use params::{Params, stream_params};
pub use phalanx_ir::ops::RopeScaling;
pub use read::ModelFolder;
pub use spec::{GptSpec, LlamaSpec, MixtralSpec, ModelSpec, RopeSpec, T5Spec};
pub use tensor::{Values, WeightTensor};
pub use weights::{TensorInfo, Weights};
pub use write::save;
