//! From a model to the programs that scripts run: gradients, slicing, and the passes between.
//!
//! The one place that knows in which order the passes come.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, Phases, Recompute, joint, slice};
use phalanx_ir::{DType, IrError, Model, Program, verify};
use phalanx_passes::{
    chunk_loss, common, dead_code_and_inputs, fold_add, fuse, sort_free, stored_params,
};

use crate::build::Compiled;

/// How a model's programs are formed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lowering {
    /// The element type that parameters are stored in; none: the one they are computed with.
    pub weights: Option<DType>,
    /// The element type that gradients are accumulated in.
    pub grads: DType,
    /// What the backward makes again.
    pub recompute: Recompute,
    /// Rows of logits that exist at a time where the head's backward follows its forward at once.
    pub loss_chunk: NonZeroUsize,
}

impl Lowering {
    /// The programs of every distinct segment of a model that is trained.
    pub fn compile(&self, model: &Model) -> Result<Compiled, IrError> {
        let phases = model.segments().iter().map(|forward| self.phases(forward));
        Ok(Compiled { phases: phases.collect::<Result<_, _>>()? })
    }

    /// The programs of a model that only runs forward, whose parameters are stored like this.
    pub fn compile_forward(model: &Model, weights: Option<DType>) -> Result<Compiled, IrError> {
        let programs = model.segments().iter();
        let programs = programs.map(|f| finished(&common(&stored(f, weights))));
        Ok(Compiled::forward(programs.collect::<Result<_, _>>()?))
    }

    fn phases(&self, forward: &Program) -> Result<Phases, IrError> {
        let whole = joint(forward, self.grads)?.program;
        let whole = common(&stored(&whole, self.weights));
        let cut = |program: &Program| {
            slice(&Joint::from(fold_add(program)), self.recompute)
        };
        let Phases { f, b, w, bw, .. } = cut(&whole);
        // Chunks need the loss and its gradient in one program, which only FBW is.
        let fbw = cut(&chunk_loss(&whole, self.loss_chunk)).fbw;
        Ok(Phases {
            f: finished(&f)?,
            b: finished(&b)?,
            w: finished(&w)?,
            bw: finished(&bw)?,
            fbw: finished(&fbw)?,
        })
    }
}

/// The program with its parameters in the type that they are stored in.
fn stored(program: &Program, weights: Option<DType>) -> Program {
    match weights {
        Some(dtype) => stored_params(program, dtype),
        None => program.clone(),
    }
}

/// The passes on a program that is not cut any further; what they made is verified.
fn finished(program: &Program) -> Result<Program, IrError> {
    let program = fuse(&sort_free(&dead_code_and_inputs(program)));
    verify(&program)?;
    Ok(program)
}
