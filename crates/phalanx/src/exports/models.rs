//! Models, and what they are written with.

/// Tensor code for a segment of your own model; the [first page](crate#your-own-model) has one.
///
/// ```
/// use phalanx::{Builder, DType};
///
/// let b = Builder::new("layer", DType::F32);
/// let h = b.boundary("h", [8, 4]);
/// b.output("h", h.matmul(b.param("w", [4, 4])).tanh());
/// assert_eq!(b.finish()?.outputs().len(), 1);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_ir::Builder;
/// The element types.
///
/// ```
/// use phalanx::DType;
///
/// assert_eq!(DType::Bf16.size(), 2);
/// assert_eq!(DType::Bf16.accumulator(), DType::F32); // the type of its sums and master weights
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.compute(DType::Bf16)
/// # }
/// ```
#[doc(inline)]
pub use phalanx_ir::DType;
#[doc(inline)]
pub use phalanx_ir::IrError;
/// The functions of one number that programs know: activations of an [`Mlp`], for example.
///
/// ```
/// use phalanx::{Mlp, UnaryKind};
///
/// let model = Mlp { activation: Some(UnaryKind::Tanh), ..Mlp::regression(4, [16], 1) };
/// assert_eq!(model.hidden, [16]);
/// ```
#[doc(inline)]
pub use phalanx_ir::ops::UnaryKind;
/// A model: instances of segments in a row, and their parameters.
///
/// ```
/// use phalanx::{Builder, Chain, DType, Init, Model, Param};
///
/// let b = Builder::new("scale", DType::F32);
/// let error = b.data("x", DType::F32, [8]) * b.param("a", [8]) - b.data("y", DType::F32, [8]);
/// b.loss("loss", error.square().sum_all());
/// let mut chain = Chain::new("scale");
/// chain.once(b, |_| Init::Normal(0.1))?;
///
/// let model: Model = chain.finish();
/// let Param { name, shape, init, .. } = &model.params()[0];
/// assert_eq!((name.as_str(), &shape[..], *init), ("a", &[8][..], Init::Normal(0.1)));
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_ir::{Init, Model, Param};
/// A network that can be built for any batch shape and precision: yours, for example.
///
/// ```
/// use phalanx::{Architecture, BatchShape, Builder, Chain, DType, Init, IrError, Model, Purpose};
///
/// /// y = a x, trained with the squared error.
/// struct Line;
///
/// impl Architecture for Line {
///     fn name(&self) -> &str { "line" }
///
///     fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError> {
///         let b = Builder::new("line", compute);
///         let y = b.data("x", DType::F32, [shape.batch, 1]).matmul(b.param("a", [1, 1]));
///         match purpose {
///             Purpose::Predict => b.probe("prediction", y),
///             Purpose::Train | Purpose::Evaluate => {
///                 let error = y - b.data("y", DType::F32, [shape.batch, 1]);
///                 b.loss("loss", error.square().sum_all() * b.scalar("inv_tokens"));
///             }
///         }
///         let mut chain = Chain::new("line");
///         chain.once(b, |_| Init::Constant(0.0))?;
///         Ok(chain.finish())
///     }
/// }
///
/// assert_eq!(Line.parameters()?, 1);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_models::Architecture;
/// A small convolutional network that classifies images.
///
/// ```
/// use phalanx::{Architecture, Cnn};
///
/// assert_eq!(Cnn::mnist().parameters()?, 6_442_762);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_models::Cnn;
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
///
/// ```
/// use phalanx::{Architecture, Llama, LlamaSpec, RopeScaling, RopeSpec};
///
/// let model = Llama::new(LlamaSpec {
///     layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn: 32, vocab: 32, context: 16,
///     norm_eps: 1e-5, rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None }, tied: false,
/// });
/// assert_eq!(model.parameters()?, 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32 + 32) + 2 * 32 * 16 + 16);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_models::Llama;
/// What an [`Mlp`] is trained for.
///
/// ```
/// use phalanx::{Loss, Mlp};
///
/// assert_eq!(Mlp::regression(4, [16], 1).loss, Loss::SquaredError);
/// assert_eq!(Mlp::classifier(4, [16], 3).loss, Loss::CrossEntropy);
/// ```
#[doc(inline)]
pub use phalanx_models::Loss;
/// An encoder and a decoder, as in T5.
///
/// ```
/// use phalanx::{Architecture, T5, T5Spec};
///
/// let model = T5 { dropout: 0.1, ..T5::new(T5Spec::new(2, 16, 4, 64, 32)) };
/// assert_eq!(model.unpredicted(12), 6);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_models::T5;
/// The values of a [`WeightTensor`], in single or double precision.
///
/// ```
/// use phalanx::{Values, WeightTensor};
///
/// let tensor = WeightTensor::f32([3], vec![1.0, 2.0, 3.0]);
/// assert!(matches!(&tensor.values, Values::F32(values) if values[2] == 3.0));
/// ```
#[doc(inline)]
pub use phalanx_models::hf::Values;
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
/// The sizes of models, as `config.json` of a Hugging Face folder has them: [`Gpt`], [`Llama`] and
/// [`T5`] show them.
#[doc(inline)]
pub use phalanx_models::hf::{GptSpec, HfError, LlamaSpec, RopeScaling, RopeSpec, T5Spec};
/// Experts in place of a [`Llama`]'s feed-forward part: set its field `experts`.
pub use phalanx_models::{AuxScope, Experts, Router};
/// What a model is built for, in [`Architecture`]: samples, tokens of each, and the purpose.
#[doc(inline)]
pub use phalanx_models::{BatchShape, Purpose};
#[doc(inline)]
pub use phalanx_models::{Chain, Mlp};
/// Segments in local form: code for one rank of an axis, with its exchanges written by hand.
///
/// ```
/// use phalanx::{Builder, DType, LocalForm};
///
/// let b = Builder::new("mlp", DType::F32);
/// let local = LocalForm::new(&b, "tp", 2);
/// let x = local.same(b.boundary("h", [8, 4]));
/// let (up, down) = (local.own_param("up", &[4, 8])?, local.own_param("down", &[8, 4])?);
/// b.output("h", x.matmul(up)?.gelu().matmul(down)?.sum_ranks()?.leave()?);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_models::{LocalForm, LocalTensor};
