//! Phalanx trains models on many ranks, and plans every step before it runs.
//!
//! You write a model once, for one device; or take one of those here. You say how many ranks there
//! are and how they divide the work. Gradients, communication, memory and the order of everything
//! in a step follow, are checked before the first rank starts, and give the results of one rank.
//!
//! # A first program
//!
//! A classifier on four ranks: two replicas, each of two ranks that share every weight.
//!
//! ```
//! use phalanx::{Ddp, Megatron, Mlp, Table, Trainer};
//!
//! // Points of a square; the class of a point is the quadrant that it is in.
//! let points = |from: usize| {
//!     let at = |i: usize| ((from + i) as f32 * 0.618).fract() * 2.0 - 1.0;
//!     let x: Vec<f32> = (0..128).flat_map(|i| [at(i), at(17 * i + 5)]).collect();
//!     let y = x.chunks(2).map(|p| i32::from(p[0] > 0.0) + 2 * i32::from(p[1] > 0.0)).collect();
//!     Table::new(128).input("x", x).labels("y", y)
//! };
//! let mut training = Trainer::new(Mlp::classifier(2, [32], 4))
//!     .data(points(0))
//!     .batch(64)
//!     .lr(1e-2)
//!     .mesh("dp=2 tp=2")
//!     .strategy(Ddp::default())
//!     .strategy(Megatron::default())
//!     .threads(1)
//!     .build()?;
//! training.fit(200)?;
//! let held_out = training.evaluate(points(1000))?;
//! assert!(held_out.accuracy > Some(0.8), "{held_out:?}");
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! # Where to look
//!
//! | you want to | use |
//! |---|---|
//! | train with few lines | [`Trainer::run`], which gives a [`Report`] |
//! | evaluate, predict, stop and go on, load, save, export | [`Trainer::build`], which gives a [`Training`] |
//! | write your own training loop | [`Trainer::stepper`], which gives a [`Stepper`] with `forward`, `backward`, `step` |
//! | give data | [`Table`] for numbers and labels; [`TextFile`], [`TokenFile`], [`MarkovCorpus`] for tokens |
//! | take a model | [`Mlp`], [`Cnn`], [`Gpt`], [`Llama`], [`T5`] |
//! | write a model | [`Builder`] for its tensor code, [`Chain`] to put segments together, [`LocalForm`] for code of one rank |
//! | use many ranks | [`Trainer::mesh`] and the strategies [`Ddp`], [`Zero`], [`Fsdp`], [`WeightUpdateSharding`], [`Megatron`], [`TensorPlan`], [`Sequence`], [`Optimus`], [`Cube`], [`Gspmd`], [`Ulysses`], [`AllGatherKv`], [`Ring`] |
//! | have ranks as processes, or on several hosts | [`Trainer::ranks`] |
//! | have layouts searched | [`Automatic`] |
//! | use a pipeline | an axis `pp` in [`Trainer::mesh`], and [`Trainer::schedule`] |
//! | know what went wrong | [`Error`]: its text says what would work; [`Error::cause`] is typed, for the library's own refusals a [`Mistake`] |
//!
//! # Your own model
//!
//! A model is a chain of segments, each a [`Builder`]'s program for the shape of one micro-batch. It
//! declares what it reads: data ports by name ([`Builder::data`]), parameters, and scalars. Three
//! scalars are provided in every step: `inv_tokens`, which is 1 ÷ the number of targets of the whole
//! step (elements of [`Table::target`], non-negative [`Table::labels`], valid tokens), `lr` and
//! `step`. The loss must be a sum over samples times `inv_tokens`: gradients of micro-batches and
//! ranks are summed, never averaged. What [`Builder::probe`] exposes is given by
//! [`Training::predict`].
//!
//! Strategies annotate values; your model can do the same with [`ir::Tensor::annotate`], which says
//! which axes shard which dims. Everything that is left out is found by propagation and by cost.
//!
//! ```
//! use phalanx::{Builder, Chain, DType, Init, Table, Trainer};
//!
//! let b = Builder::new("two_layers", DType::F32);
//! let x = b.data("x", DType::F32, [8, 4]).annotate("0:dp"); // the batch on dp
//! let up = b.param("up", [4, 16]).annotate("1:tp"); // by columns
//! let down = b.param("down", [16, 1]).annotate("0:tp"); // by rows
//! let y = x.matmul(up).tanh().matmul(down);
//! b.probe("sum", y);
//! b.loss("loss", y.squared_error(b.data("y", DType::F32, [8, 1])) * b.scalar("inv_tokens"));
//! let mut chain = Chain::new("annotated");
//! chain.once(b, |_| Init::Normal(0.5))?;
//! let model = chain.finish();
//!
//! let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
//! let y: Vec<f32> = x.chunks(4).map(|row| row.iter().sum()).collect();
//! let data = Table::new(8).input("x", x).target("y", y);
//! let run = |mesh: &str| {
//!     let trainer = Trainer::of_model(model.clone()).data(&data).mesh(mesh).lr(0.05).threads(1);
//!     let mut training = trainer.build()?;
//!     training.fit(20)?;
//!     let sums = training.predict(&data)?;
//!     Ok::<_, phalanx::Error>((training.into_report(), sums["sum"].to_f64()))
//! };
//! let ((one, alone), (four, together)) = (run("dp=1 tp=1")?, run("dp=2 tp=2")?);
//! assert!(one.last_loss() < 0.5 * one.first_loss());
//! assert!((four.last_loss() - one.last_loss()).abs() < 1e-4 * one.last_loss());
//! assert!(alone.iter().zip(&together).all(|(a, b)| (a - b).abs() < 1e-3));
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
//! use phalanx::{Ddp, Mlp, NamedSchedule, Table, Trainer, UnaryKind};
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
//! # Language models
//!
//! ```
//! use phalanx::{Llama, LlamaSpec, MarkovCorpus, RopeScaling, RopeSpec, Trainer};
//!
//! let model = Llama::new(LlamaSpec {
//!     layers: 2,
//!     width: 16,
//!     heads: 2,
//!     kv_heads: 1,
//!     head_dim: 8,
//!     ffn: 32,
//!     vocab: 32,
//!     context: 16,
//!     norm_eps: 1e-5,
//!     rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
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
//! # What is stable
//!
//! The items of this page are for users. [`ir`], [`models`], [`data`], [`pipeline`] and [`spmd`] hold
//! what models, schedules and strategies of your own are written with. All other modules are
//! internals, which the command `phalanx` uses: they are hidden here and change without notice.
#![forbid(unsafe_code)]

mod axes;
mod checkpoints;
mod data_source;
mod evaluate;
mod exports;
mod forms;
mod mistake;
mod ranks_as;
mod replicas;
mod report;
mod stepper;
mod table;
mod trainer;
mod training;
mod weights;
mod words;

pub use phalanx_data as data;
pub use phalanx_ir as ir;
pub use phalanx_models as models;
pub use phalanx_pipeline as pipeline;
pub use phalanx_spmd as spmd;

#[doc(hidden)]
pub use {
    phalanx_autodiff as autodiff, phalanx_bench as bench, phalanx_checkpoint as checkpoint,
    phalanx_config as config, phalanx_cost as cost, phalanx_cpu as cpu, phalanx_engine as engine,
    phalanx_error as error, phalanx_inspect as inspect, phalanx_passes as passes,
    phalanx_reference as reference, phalanx_runtime as runtime, phalanx_script as script,
    phalanx_session as session, phalanx_train as train,
};

pub use data_source::Data;
pub use evaluate::Evaluation;
pub use exports::*;
pub use mistake::Mistake;
pub use phalanx_session::job::is_first;
pub use ranks_as::RanksAs::{self, Processes};
pub use replicas::LocalSgd;
pub use report::Report;
pub use stepper::Stepper;
pub use table::Table;
pub use trainer::{Trainer, Verdict};
pub use training::Training;
