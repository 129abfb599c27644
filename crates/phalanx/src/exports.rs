//! What users write, from the crates below, with an example each.

/// Context parallelism: sequences are split, and attention gathers keys and values.
///
/// ```
/// use phalanx::AllGatherKv;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("cp=2").strategy(AllGatherKv::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::AllGatherKv;
/// Layouts that a search found.
///
/// ```
/// use phalanx::spmd::Costs;
/// use phalanx::{Architecture, Automatic, BatchShape, DType, Mlp};
///
/// let model = Mlp::regression(1, [8], 1).model(BatchShape { batch: 4, seq: 1 }, DType::F32)?;
/// let found = Automatic::search(&model, &"dp=2".parse()?, &Costs::default())?;
/// assert!(found.seconds > 0.0); // Trainer::of_model(model).mesh("dp=2").strategy(found)
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Automatic;
#[doc(inline)]
pub use phalanx_spmd::strategies::Cut;
/// Data parallelism: ranks hold the same weights and share the batch.
///
/// ```
/// use phalanx::Ddp;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("dp=4").strategy(Ddp::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Ddp;
/// Fully sharded data parallelism: weights are gathered for the layers that run.
///
/// ```
/// use phalanx::Fsdp;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("dp=4").strategy(Fsdp { shard: Some(2), ..Fsdp::default() }) // hybrid
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Fsdp;
/// Tensor parallelism: weights split by columns and rows alternately.
///
/// ```
/// use phalanx::Megatron;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=2").strategy(Megatron::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Megatron;
/// Sequence parallelism: what lies between split weights is split along the sequence.
///
/// ```
/// use phalanx::{Megatron, Sequence};
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=2").strategy(Megatron::default()).strategy(Sequence::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Sequence;
/// Tensor parallelism by a plan of your own, by parameter name.
///
/// ```
/// use phalanx::{Cut, TensorPlan};
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=2").strategy(TensorPlan::new("tp").cut("mlp.up", Cut::Columns).cut("mlp.down", Cut::Rows))
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::TensorPlan;
/// Context parallelism: sequences are split, and in attention the heads.
///
/// ```
/// use phalanx::Ulysses;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("cp=2").strategy(Ulysses::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Ulysses;
/// Data parallelism in which each rank updates its share of the weights.
///
/// ```
/// use phalanx::WeightUpdateSharding;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("dp=4").strategy(WeightUpdateSharding::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::WeightUpdateSharding;
/// Data parallelism with optimizer state, gradients and weights in shards, by stage.
///
/// ```
/// use phalanx::Zero;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("dp=4").strategy(Zero::stage(3))
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Zero;
#[doc(inline)]
pub use phalanx_spmd::{SpmdError, Strategy};

/// The order of a pipeline, by name.
///
/// ```
/// use phalanx::NamedSchedule;
///
/// let schedule: NamedSchedule = "zb-h1".parse()?;
/// assert_eq!(schedule, NamedSchedule::ZbH1);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_pipeline::NamedSchedule;
/// The order of a pipeline, checked when it is made: your own, for example.
///
/// ```
/// use phalanx::Schedule;
/// use phalanx::pipeline::{Placement, bwd, fwd};
///
/// // Two stages, three micro-batches: all forwards, then all backwards.
/// let schedule = Schedule::new("own", 3, Placement::looped(2, 1)?, |_| fwd(0..3).then(bwd(0..3)))?;
/// assert_eq!(schedule.microbatches(), 3);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_pipeline::Schedule;
/// Which layers the stages of a pipeline get.
///
/// ```
/// use phalanx::StageSplit;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("pp=2").split(StageSplit::Count)
/// # }
/// ```
#[doc(inline)]
pub use phalanx_session::StageSplit;
#[doc(inline)]
pub use phalanx_session::{PipelineOrder, StepResult};

/// What the backward pass recomputes instead of keeping it.
///
/// ```
/// use phalanx::Recompute;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.recompute(Recompute::Full)
/// # }
/// ```
#[doc(inline)]
pub use phalanx_autodiff::Recompute;
#[doc(inline)]
pub use phalanx_script::Category;
/// The update rule.
///
/// ```
/// use phalanx::Optimizer;
///
/// let adam = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01 };
/// assert_ne!(adam, Optimizer::adamw());
/// assert_eq!(Optimizer::sgd(0.9), Optimizer::Sgd { momentum: 0.9, nesterov: false, decay: 0.0 });
/// ```
#[doc(inline)]
pub use phalanx_script::Optimizer;
#[doc(inline)]
pub use phalanx_train::steps::TrainedStep;

/// The GPT-2 architecture.
///
/// ```
/// use phalanx::{Architecture, Gpt, GptSpec};
///
/// let spec = GptSpec {
///     layers: 2, width: 16, heads: 2, ffn: 64, vocab: 32, context: 16, norm_eps: 1e-5, tied: true,
/// };
/// let model = Gpt { dropout: 0.1, ..Gpt::new(spec) };
/// assert!(model.parameters()? > 5000);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_models::Gpt;
/// The LLaMA architecture; the [first page](crate#language-models) trains one.
#[doc(inline)]
pub use phalanx_models::Llama;
/// A tensor in memory: its shape and its values.
///
/// ```
/// use phalanx::WeightTensor;
///
/// let tensor = WeightTensor::f32([2, 2], vec![1.0, 2.0, 3.0, 4.0]);
/// assert_eq!((tensor.len(), tensor.to_f64()[3]), (4, 4.0));
/// ```
#[doc(inline)]
pub use phalanx_models::hf::WeightTensor;
#[doc(inline)]
pub use phalanx_models::hf::{GptSpec, HfError, LlamaSpec, RopeScaling, RopeSpec, Values};
#[doc(inline)]
pub use phalanx_models::{Architecture, BatchShape, Chain, Loss, Mlp, Purpose};

/// Synthetic tokens whose entropy is known.
///
/// ```
/// use phalanx::{Corpus, MarkovCorpus};
///
/// let corpus = MarkovCorpus::new(0, 32, 1 << 20)?; // seed, vocabulary, tokens
/// assert_eq!(corpus.len_tokens(), 1 << 20);
/// # Ok::<(), phalanx::DataError>(())
/// ```
#[doc(inline)]
pub use phalanx_data::MarkovCorpus;
/// A file whose bytes are tokens.
///
/// ```no_run
/// use phalanx::{Data, TextFile};
///
/// let data: Data = TextFile::open("book.txt".as_ref())?.into(); // every byte is a token
/// # Ok::<(), phalanx::DataError>(())
/// ```
#[doc(inline)]
pub use phalanx_data::TextFile;
#[doc(inline)]
pub use phalanx_data::{Corpus, DataError, TokenFile, TokenWidth};

/// Tensor code for a segment of your own model; the [first page](crate#your-own-model) has one.
#[doc(inline)]
pub use phalanx_ir::Builder;
#[doc(inline)]
pub use phalanx_ir::ops::UnaryKind;
#[doc(inline)]
pub use phalanx_ir::{DType, Init, IrError, Model, Param};

#[doc(inline)]
pub use phalanx_error::{Error, Problem, Remedy, Result};
