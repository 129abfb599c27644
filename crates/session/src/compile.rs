//! Compiles the programs that scripts run, as a session's configuration says.

use std::num::NonZeroUsize;

use phalanx_autodiff::{LossSeed, Recompute};
use phalanx_ir::{DType, Model};
use phalanx_script::{Compiled, Lowering, Precision, ScriptError};
use phalanx_spmd::Partition;

/// Rows of logits that exist at a time where the head's backward directly follows its forward:
/// enough for an efficient product, and a small fraction of a batch.
const LOSS_CHUNK: NonZeroUsize = NonZeroUsize::new(256).expect("it is not zero");

/// The programs of every distinct segment of a model that is trained.
pub(super) fn compile(
    model: &Model,
    precision: Precision,
    seed: LossSeed,
    recompute: Recompute,
    partition: &Partition,
) -> Result<Compiled, ScriptError> {
    let weights = Some(precision.weights);
    let (grads, loss_chunk) = (precision.grads, LOSS_CHUNK);
    let lowering = Lowering { weights, grads, seed, recompute, loss_chunk };
    lowering.compile(model, Some(partition))
}

/// The programs of a model that only runs forward.
pub(super) fn compile_forward(
    model: &Model,
    weights: DType,
    partition: &Partition,
) -> Result<Compiled, ScriptError> {
    Lowering::compile_forward(model, Some(weights), Some(partition))
}
