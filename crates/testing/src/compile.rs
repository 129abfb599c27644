//! From a model to the programs of its segments.

use std::num::NonZeroUsize;

use phalanx_autodiff::{LossSeed, Recompute, joint, slice};
use phalanx_ir::{DType, Model, Program};
use phalanx_script::{Compiled, Lowering};

/// The plain programs of every segment, as reverse mode forms them.
pub fn compile(model: &Model, grads: DType, recompute: Recompute) -> Compiled {
    let phases = |program: &Program| slice(&joint(program, grads).unwrap(), recompute);
    Compiled { phases: model.segments().iter().map(phases).collect() }
}

/// The same after every pass, as a trainer runs them: where forward and backward are one program,
/// the loss is in chunks, here of a few rows, so that small models have several.
pub fn optimise(model: &Model, grads: DType, recompute: Recompute) -> Compiled {
    let (seed, loss_chunk) = (LossSeed::One, NonZeroUsize::new(5).unwrap());
    Lowering { weights: None, grads, seed, recompute, loss_chunk }.compile(model, None).unwrap()
}
