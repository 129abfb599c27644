//! Phalanx trains large models on many ranks, and plans every step before it runs.
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
//! # Many ranks
//!
//! [`Trainer::mesh`] arranges ranks, [`Trainer::strategy`] divides the work among them: [`Ddp`],
//! [`Zero`], [`Fsdp`], [`WeightUpdateSharding`], [`Megatron`], [`Sequence`], [`Ulysses`] and
//! [`AllGatherKv`] compose in any order. They annotate values; the partitioner does the rest. Your
//! own model can do the same for any value with [`ir::Tensor::annotate`], which says which axes
//! shard which dims; everything that is left out is found by propagation and by cost.
//!
//! ```
//! use phalanx::ir::{Builder, DType, Init};
//! use phalanx::models::Chain;
//! use phalanx::{Table, Trainer};
//!
//! let b = Builder::new("two_layers", DType::F32);
//! let x = b.data("x", DType::F32, [8, 4]).annotate("0:dp"); // the batch on dp
//! let up = b.param("up", [4, 16]).annotate("1:tp"); // by columns
//! let down = b.param("down", [16, 1]).annotate("0:tp"); // by rows
//! let y = x.matmul(up).tanh().matmul(down);
//! b.loss("loss", y.squared_error(b.data("y", DType::F32, [8, 1])) * b.scalar("inv_tokens"));
//! let mut chain = Chain::new("annotated");
//! chain.once(b, |_| Init::Normal(0.5))?;
//! let model = chain.finish();
//!
//! let run = |mesh: &str| {
//!     let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
//!     let y: Vec<f32> = x.chunks(4).map(|row| row.iter().sum()).collect();
//!     let data = Table::new(8).input("x", x).target("y", y);
//!     Trainer::of_model(model.clone()).data(data).mesh(mesh).lr(0.05).steps(20).threads(1).run()
//! };
//! let (one, four) = (run("dp=1 tp=1")?, run("dp=2 tp=2")?);
//! assert!(one.last_loss() < 0.5 * one.first_loss());
//! assert!((four.last_loss() - one.last_loss()).abs() < 1e-4 * one.last_loss());
//! assert_eq!(four.param("up")?.shape, [4, 16]); // parameters come back whole
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Pipelines
//!
//! The stages of a pipeline lie along the axis `pp` of a mesh: each has some of the model's
//! segments, and micro-batches pass through them in the order of a schedule
//! ([`Trainer::schedule`]). Strategies divide the work within each stage, as they do without a
//! pipeline.
//!
//! ```
//! use phalanx::ir::ops::UnaryKind;
//! use phalanx::models::Mlp;
//! use phalanx::{Ddp, NamedSchedule, Table, Trainer};
//!
//! let x: Vec<f32> = (0..16).map(|i| i as f32 / 8.0 - 1.0).collect();
//! let y = x.iter().map(|x| x * x).collect();
//! let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(1, [16, 16], 1) };
//! let report = Trainer::new(model)
//!     .data(Table::new(16).input("x", x).target("y", y))
//!     .mesh("dp=2 pp=2")
//!     .strategy(Ddp::default())
//!     .schedule(NamedSchedule::ZbH1)
//!     .batch(16)
//!     .microbatches(4)
//!     .lr(1e-2)
//!     .steps(40)
//!     .threads(1)
//!     .run()?;
//! assert!(report.last_loss() < 0.5 * report.first_loss());
//! assert!(report.layout.starts_with("4 ranks, pp 2 · dp 2"), "{}", report.layout);
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! The command `phalanx` is a user of this library: [`train::train()`] is its main job.
#![forbid(unsafe_code)]

mod data_source;
mod report;
mod trainer;

pub use phalanx_autodiff as autodiff;
pub use phalanx_bench as bench;
pub use phalanx_config as config;
pub use phalanx_cost as cost;
pub use phalanx_cpu as cpu;
pub use phalanx_data as data;
pub use phalanx_engine as engine;
pub use phalanx_error as error;
pub use phalanx_inspect as inspect;
pub use phalanx_ir as ir;
pub use phalanx_models as models;
pub use phalanx_passes as passes;
pub use phalanx_pipeline as pipeline;
pub use phalanx_reference as reference;
pub use phalanx_runtime as runtime;
pub use phalanx_script as script;
pub use phalanx_session as session;
pub use phalanx_spmd as spmd;
pub use phalanx_train as train;

pub use data_source::{Data, Table};
pub use phalanx_error::{Error, Result};
pub use phalanx_pipeline::{NamedSchedule, Schedule};
pub use phalanx_script::{Category, Optimizer};
pub use phalanx_session::{PipelineOrder, StageSplit};
pub use phalanx_spmd::Strategy;
pub use phalanx_spmd::strategies::{
    AllGatherKv, Automatic, Cut, Ddp, Fsdp, Megatron, Sequence, TensorPlan, Ulysses,
    WeightUpdateSharding, Zero,
};
pub use phalanx_train::steps::TrainedStep;
pub use report::Report;
pub use trainer::Trainer;
