//! Phalanx trains large models, and works out beforehand how it should be done.
//!
//! A model is written once, for one device, as ordinary tensor code ([`ir::Builder`]). Gradients,
//! memory and the order of everything that happens in a step follow from it as data: typed
//! programs ([`ir`]), a script ([`script`]) and a plan of its memory, which an engine then runs.
//!
//! ```
//! use phalanx::models::{Llama, hf};
//! use phalanx::{Trainer, data::MarkovCorpus};
//!
//! let model = Llama::new(hf::LlamaSpec {
//!     layers: 2,
//!     width: 16,
//!     heads: 2,
//!     kv_heads: 1,
//!     head_dim: 8,
//!     ffn: 32,
//!     vocab: 32,
//!     context: 16,
//!     norm_eps: 1e-5,
//!     rope: hf::RopeSpec { theta: 10_000.0, scaling: hf::RopeScaling::None },
//!     tied: false,
//! });
//! let report = Trainer::new(model)
//!     .data(MarkovCorpus::new(0, 32, 1 << 20)?)
//!     .batch(8)
//!     .seq_len(16)
//!     .lr(1e-2)
//!     .steps(20)
//!     .threads(1)
//!     .on_step(|step| println!("step {}: loss {:.3}", step.step, step.result.loss))
//!     .run()?;
//! assert!(report.last_loss() < report.first_loss());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The command `phalanx` is a user of this library: [`train::train()`] is its main job.
#![forbid(unsafe_code)]

mod data_source;
mod trainer;

pub use phalanx_autodiff as autodiff;
pub use phalanx_cpu as cpu;
pub use phalanx_data as data;
pub use phalanx_engine as engine;
pub use phalanx_ir as ir;
pub use phalanx_models as models;
pub use phalanx_passes as passes;
pub use phalanx_pipeline as pipeline;
pub use phalanx_reference as reference;
pub use phalanx_runtime as runtime;
pub use phalanx_script as script;
pub use phalanx_train as train;

pub use data_source::{Data, Table};
pub use phalanx_script::Optimizer;
pub use phalanx_train::error::{Error, Result};
pub use phalanx_train::steps::Taken;
pub use trainer::{Report, Trainer};
