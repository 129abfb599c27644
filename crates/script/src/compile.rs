//! Compiles a model into the programs that scripts run: gradients, slicing, and the passes between.
//!
//! Only this file knows the order of the passes.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, LossSeed, Phases, Recompute, joint_from, slice};
use phalanx_ir::{Axis, DType, IrError, Model, Program, verify};
use phalanx_passes::{
    chunk_loss, common, common_at_once, dead_code_and_inputs, fold_add, fuse, overlap, pack,
    peak_bytes, sort_free, stored_params, stream, stream_keys,
};
use phalanx_spmd::Partition;

use crate::build::Compiled;
use crate::error::ScriptError;

/// How many instructions before its turn a collective may start: enough to overlap with one
/// product, and few enough that not everything is gathered at once.
const AHEAD: usize = 4;

/// How a model's programs are compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lowering {
    /// The element type that parameters are stored in; none: the one they are computed with.
    pub weights: Option<DType>,
    /// The element type that gradients are accumulated in.
    pub grads: DType,
    /// The cotangent of losses.
    pub seed: LossSeed,
    /// What the backward recomputes.
    pub recompute: Recompute,
    /// Rows of logits that exist at a time where the head's backward directly follows its forward.
    pub loss_chunk: NonZeroUsize,
}

impl Lowering {
    /// The programs of every distinct segment of a model that is trained, partitioned if there is a
    /// partition.
    pub fn compile(
        &self,
        model: &Model,
        partition: Option<&Partition>,
    ) -> Result<Compiled, ScriptError> {
        let segments = model.segments().iter().enumerate();
        let phases = segments.map(|(segment, forward)| {
            let whole = joint_from(forward, self.grads, self.seed)?;
            self.phases(&placed(whole, segment, partition)?, streams(partition))
        });
        Ok(Compiled { phases: phases.collect::<Result<_, ScriptError>>()? })
    }

    /// The programs of a model that only runs forward, whose parameters are stored like this.
    pub fn compile_forward(
        model: &Model,
        weights: Option<DType>,
        partition: Option<&Partition>,
    ) -> Result<Compiled, ScriptError> {
        let segments = model.segments().iter().enumerate();
        let programs = segments.map(|(segment, forward)| {
            let whole = placed(Joint::from(forward.clone()), segment, partition)?;
            let whole = stream(&common(&stored(&whole, weights)), streams(partition));
            finished(&whole)
        });
        Ok(Compiled::forward(programs.collect::<Result<_, ScriptError>>()?))
    }

    fn phases(&self, whole: &Program, streams: &[Axis]) -> Result<Phases, ScriptError> {
        let whole = common(&stored(whole, self.weights));
        let cut = |program: &Program| slice(&Joint::from(program.clone()), self.recompute);
        let Phases { f, b, w, bw, .. } = cut(&stream(&fold_add(&whole), streams));
        // Chunks need the loss and its gradient in one program, which only FBW is.
        let chunked = fold_add(&chunk_loss(&whole, self.loss_chunk));
        let at_once = |program: &Program| finished(&common_at_once(&cut(program).fbw));
        // There one gathered operand may serve F, B and W, which bring their blocks one by one: blocks must save memory.
        let gathered = at_once(&stream_keys(&chunked, streams))?;
        let blocks = at_once(&stream(&chunked, streams))?;
        let fbw = if peak_bytes(&blocks) < peak_bytes(&gathered) { blocks } else { gathered };
        Ok(Phases { f: finished(&f)?, b: finished(&b)?, w: finished(&w)?, bw: finished(&bw)?, fbw })
    }
}

/// The program of a joint graph, partitioned if there is a partition. Partitioning comes first,
/// while it is known which gradient belongs to which op.
fn placed(
    joint: Joint,
    segment: usize,
    partition: Option<&Partition>,
) -> Result<Program, ScriptError> {
    match partition {
        None => Ok(joint.program),
        Some(partition) => Ok(partition.joint(segment, &joint)?.program),
    }
}

/// The axes over which keys, values and operands of products come block by block.
fn streams(partition: Option<&Partition>) -> &[Axis] {
    partition.map_or(&[], Partition::streams)
}

/// The program with its parameters in the type that they are stored in.
fn stored(program: &Program, weights: Option<DType>) -> Program {
    match weights {
        Some(dtype) => stored_params(program, dtype),
        None => program.clone(),
    }
}

/// Runs the passes on a program that is not sliced any further, and verifies the result.
fn finished(program: &Program) -> Result<Program, ScriptError> {
    let program = fuse(&sort_free(&pack(&dead_code_and_inputs(program))));
    let program = overlap(&program, AHEAD);
    verify(&program).map_err(IrError::from)?;
    Ok(program)
}
