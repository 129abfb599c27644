//! From a model to the programs that scripts run: gradients, partitioning, slicing, and the passes
//! between.
//!
//! The one place that knows in which order the passes come.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, Phases, Recompute, joint, slice};
use phalanx_ir::{DType, IrError, Mesh, Model, Program, verify};
use phalanx_passes::{
    chunk_loss, common, common_at_once, dead_code_and_inputs, fold_add, fuse, sort_free,
    stored_params,
};
use phalanx_spmd::{Annotations, Costs, SpmdError, partition};

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

/// Where a model runs: on a mesh, with the annotations of each distinct segment, and what the
/// partitioner weighs.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The annotations, in the order of [`Model::segments`].
    pub annotations: &'a [Annotations],
    /// What open choices are weighed by.
    pub costs: &'a Costs,
}

impl Lowering {
    /// The programs of every distinct segment of a model that is trained on one rank.
    pub fn compile(&self, model: &Model) -> Result<Compiled, IrError> {
        let phases =
            model.segments().iter().map(|forward| self.phases(&joint(forward, self.grads)?));
        Ok(Compiled { phases: phases.collect::<Result<_, _>>()? })
    }

    /// The programs of every distinct segment of a model that is trained on a mesh. Partitioning
    /// comes first of all passes: it knows of each gradient which op it belongs to, and passes then
    /// see the layouts.
    pub fn compile_on(&self, model: &Model, on: Placement<'_>) -> Result<Compiled, SpmdError> {
        let phases = model.segments().iter().zip(on.annotations).map(|(forward, annotations)| {
            let whole = joint(forward, self.grads)?;
            Ok(self.phases(&partition(&whole, on.mesh, annotations, on.costs)?)?)
        });
        Ok(Compiled { phases: phases.collect::<Result<_, SpmdError>>()? })
    }

    /// The programs of a model that only runs forward, whose parameters are stored like this.
    pub fn compile_forward(model: &Model, weights: Option<DType>) -> Result<Compiled, IrError> {
        let programs = model.segments().iter();
        let programs = programs.map(|f| finished(&common(&stored(f, weights))));
        Ok(Compiled::forward(programs.collect::<Result<_, _>>()?))
    }

    /// The same on a mesh.
    pub fn compile_forward_on(
        model: &Model,
        weights: Option<DType>,
        on: Placement<'_>,
    ) -> Result<Compiled, SpmdError> {
        let programs = model.segments().iter().zip(on.annotations).map(|(forward, annotations)| {
            let whole = Joint::from(forward.clone());
            let parts = partition(&whole, on.mesh, annotations, on.costs)?;
            Ok(finished(&common(&stored(&parts.program, weights)))?)
        });
        Ok(Compiled::forward(programs.collect::<Result<_, SpmdError>>()?))
    }

    fn phases(&self, joint: &Joint) -> Result<Phases, IrError> {
        let whole = common(&stored(&joint.program, self.weights));
        let cut = |program: &Program| slice(&Joint::from(fold_add(program)), self.recompute);
        let Phases { f, b, w, bw, .. } = cut(&whole);
        // Chunks need the loss and its gradient in one program, which only FBW is.
        let fbw = cut(&chunk_loss(&whole, self.loss_chunk)).fbw;
        Ok(Phases {
            f: finished(&f)?,
            b: finished(&b)?,
            w: finished(&w)?,
            bw: finished(&bw)?,
            fbw: finished(&common_at_once(&fbw))?,
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
