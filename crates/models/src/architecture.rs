//! What a trainer needs to know about a family of networks.

use phalanx_ir::{DType, IrError, Model};

use crate::hf::ModelSpec;

/// The names of inputs and outputs that the programs of all architectures share.
pub mod port {
    /// Data: token ids, `i32[batch, seq]`.
    pub const IDS: &str = "ids";
    /// Data: the token that follows each position, `i32[batch, seq]`; negative where it does not count.
    pub const TARGETS: &str = "targets";
    /// Scalar: 1 / the number of elements that the step's loss is averaged over, counted over all
    /// ranks and micro-batches: valid targets of a language model, elements of `y` of a regression,
    /// labels of a classification. Besides it a step provides the scalars `lr` and `step`.
    pub const INV_TOKENS: &str = "inv_tokens";
    /// Scalar: 1 / the number of samples of a step, counted like [`INV_TOKENS`].
    pub const INV_SAMPLES: &str = "inv_samples";
    /// The loss: a sum times [`INV_TOKENS`].
    pub const LOSS: &str = "loss";
    /// Probe: the logits of a language model, `[batch, seq, vocab]`.
    pub const LOGITS: &str = "logits";
    /// Data: the features of a regression, `f32[batch, inputs]`.
    pub const X: &str = "x";
    /// Data: the values to predict, `f32[batch, outputs]`, or the classes, `i32[batch]`.
    pub const Y: &str = "y";
    /// Probe: what a perceptron predicts, numbers or the logits of classes, `[batch, outputs]`.
    pub const PREDICTION: &str = "prediction";
    /// Probe: how many tokens of each group chose each expert, `[batch, groups, experts]`.
    pub const CHOSEN: &str = "experts.chosen";
    /// Probe: how many of them found a place, if some may not; by place, where experts are distributed to ranks.
    pub const PLACED: &str = "experts.placed";
    /// Loss, where rooms are bounded: the rows that found no room. It is no part of what is minimised.
    pub const LACKING: &str = "experts.lacking";
    /// Probe, where a caller asks for it: the slot of each token's choices, `[batch, groups, tokens, choices]`.
    pub const SLOT: &str = "experts.slot";
    /// Probe, where a caller asks for it: how many rows the runs of each region have, `[parts, …, runs]`.
    pub const ROWS: &str = "experts.rows";
    /// The boundary value between segments.
    pub const H: &str = "h";
    /// The encoder's result, a boundary value that every block of a decoder reads.
    pub const MEMORY: &str = "memory";
}

/// The shape of one micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BatchShape {
    /// Sequences, or samples of a model without sequences.
    pub batch: usize,
    /// Tokens of each sequence; models without sequences ignore it.
    pub seq: usize,
}

/// What a model is used for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Purpose {
    /// The loss, with dropout.
    Train,
    /// The loss, without dropout.
    Evaluate,
    /// Logits or predictions as a probe, without dropout, targets or loss.
    Predict,
}

/// A network that can be built as a model for any batch shape and precision.
pub trait Architecture {
    /// The name of the family.
    fn name(&self) -> &str;

    /// The model for a purpose. Parameters are the same, in the same order, for every purpose and shape.
    fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError>;

    /// How many tokens at the beginning of each sample are read and not predicted, of so many.
    fn unpredicted(&self, _seq: usize) -> usize {
        0
    }

    /// The same network with more room for the rows of experts, if it bounds that.
    fn with_more_room(&self) -> Option<Box<dyn Architecture>> {
        None
    }

    /// The same network whose rows of experts stay on the ranks that have their tokens, if steps may choose that.
    fn with_rows_at_home(&self) -> Option<Box<dyn Architecture>> {
        None
    }

    /// The specification of this model at Hugging Face; `None` if it is unknown there.
    fn spec(&self) -> Option<ModelSpec> {
        None
    }

    /// The model to train.
    fn model(&self, shape: BatchShape, compute: DType) -> Result<Model, IrError> {
        self.build(shape, compute, Purpose::Train)
    }

    /// The model whose loss is evaluated: without dropout.
    fn evaluation(&self, shape: BatchShape, compute: DType) -> Result<Model, IrError> {
        self.build(shape, compute, Purpose::Evaluate)
    }

    /// The model that emits logits (or predictions) as its only probe.
    fn logits(&self, shape: BatchShape, compute: DType) -> Result<Model, IrError> {
        self.build(shape, compute, Purpose::Predict)
    }

    /// The number of parameters.
    fn parameters(&self) -> Result<usize, IrError> {
        let shape = BatchShape { batch: 1, seq: 1 };
        Ok(self.model(shape, DType::F32)?.elements())
    }
}
