//! How work and memory are divided among ranks.

#[doc(inline)]
pub use phalanx_spmd::SpmdError;
/// A way to divide work and memory among ranks; yours, for example.
///
/// ```
/// use phalanx::spmd::Annotator;
/// use phalanx::{Mlp, SpmdError, Strategy, Table, Trainer};
///
/// struct Batch;
///
/// impl Strategy for Batch {
///     fn name(&self) -> &'static str { "batch" }
///
///     fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
///         ctx.boundaries().into_iter().try_for_each(|value| ctx.shard(value, 0, "dp"))?;
///         ctx.params().into_iter().try_for_each(|param| ctx.replicate(param.value, "dp"))
///     }
/// }
///
/// let data = Table::new(4).input("x", vec![0.0, 1.0, 2.0, 3.0]).target("y", vec![1.0, 3.0, 5.0, 7.0]);
/// let trainer = Trainer::new(Mlp::regression(1, [], 1)).data(data).batch(4).threads(1);
/// let report = trainer.mesh("dp=2").strategy(Batch).lr(0.1).steps(30).run()?;
/// assert!(report.last_loss() < report.first_loss());
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_spmd::Strategy;
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
/// 3D tensor parallelism: weights and activations in blocks on a cube of ranks.
///
/// ```
/// use phalanx::Cube;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=8").strategy(Cube::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Cube;
/// How one weight is split, in a [`TensorPlan`].
///
/// ```
/// use phalanx::{Cut, TensorPlan};
///
/// let plan = TensorPlan::new("tp").cut("*up", Cut::Columns).cut("*down", Cut::Rows);
/// # fn set<'a>(trainer: phalanx::Trainer<'a>, plan: TensorPlan) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=2").strategy(plan)
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Cut;
/// Data parallelism in which the first rank keeps the optimizer's state and updates for all.
///
/// ```
/// use phalanx::DataParallel;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("dp=4").strategy(DataParallel::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::DataParallel;
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
/// How tokens meet the experts of other ranks, in an [`ExpertParallel`].
///
/// ```
/// use phalanx::{ExpertExchange, ExpertParallel};
///
/// let exchange = ExpertExchange::AllToAll;
/// let experts = ExpertParallel { exchange, ..ExpertParallel::over(2) };
/// assert_eq!(experts.ranks, 2);
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::ExpertExchange;
/// Expert parallelism: some of the ranks that have different samples have different experts too.
///
/// ```
/// use phalanx::{Ddp, ExpertParallel};
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("dp=4").strategy(Ddp::default()).strategy(ExpertParallel::over(2))
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::ExpertParallel;
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
/// GSPMD's 2-D recipe: weights and activations in blocks on a grid of ranks, which need not be a square.
///
/// ```
/// use phalanx::Gspmd;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=8").strategy(Gspmd { rows: 2, ..Gspmd::default() }) // two rows of four
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Gspmd;
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
/// 2D and 2.5D tensor parallelism: weights and activations in blocks on squares of ranks.
///
/// ```
/// use phalanx::Optimus;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("tp=8").strategy(Optimus { depth: 2, ..Optimus::default() }) // two squares of 2 × 2
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Optimus;
/// Context parallelism: sequences are split, and keys and values go around a ring of ranks.
///
/// ```
/// use phalanx::Ring;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("cp=2").strategy(Ring::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::Ring;
/// Context parallelism with stored scores: keys, then values go around a ring of ranks. The model's
/// attention stores its scores.
///
/// ```
/// use phalanx::RingSelfAttention;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("cp=2").strategy(RingSelfAttention::default())
/// # }
/// ```
#[doc(inline)]
pub use phalanx_spmd::strategies::RingSelfAttention;
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
