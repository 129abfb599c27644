//! From a model to the programs that scripts run: gradients, slicing, and the passes between.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, Phases, Recompute, joint, slice};
use phalanx_ir::{DType, IrError, Model, Program, verify};
use phalanx_passes::{
    chunk_loss, common, dead_code_and_inputs, fold_add, fuse, sort_free, stored_params,
};
use phalanx_script::{Compiled, Precision};

/// Rows of logits that exist at a time where the head's backward follows its forward at once:
/// enough for an efficient product, and a small fraction of a batch.
const LOSS_CHUNK: NonZeroUsize = NonZeroUsize::new(256).expect("it is not zero");

/// The programs of every distinct segment of a model that is trained.
pub fn compile(
    model: &Model,
    precision: Precision,
    recompute: Recompute,
) -> Result<Compiled, IrError> {
    let phases = model.segments().iter();
    let phases = phases.map(|forward| phases_of(forward, precision, recompute));
    Ok(Compiled { phases: phases.collect::<Result<_, _>>()? })
}

/// The programs of a model that only runs forward.
pub fn compile_forward(model: &Model, weights: DType) -> Result<Compiled, IrError> {
    let programs = model.segments().iter();
    let programs = programs.map(|f| finished(&common(&stored_params(f, weights))));
    Ok(Compiled::forward(programs.collect::<Result<_, _>>()?))
}

fn phases_of(
    forward: &Program,
    precision: Precision,
    recompute: Recompute,
) -> Result<Phases, IrError> {
    let whole = joint(forward, precision.grads)?.program;
    let whole = common(&stored_params(&whole, precision.weights));
    let cut = |program: &Program| {
        let program = fold_add(program);
        slice(&Joint { program }, recompute)
    };
    let Phases { f, b, w, bw, .. } = cut(&whole);
    // Chunks need the loss and its gradient in one program, which only FBW is.
    let fbw = cut(&chunk_loss(&whole, LOSS_CHUNK)).fbw;
    Ok(Phases {
        f: finished(&f)?,
        b: finished(&b)?,
        w: finished(&w)?,
        bw: finished(&bw)?,
        fbw: finished(&fbw)?,
    })
}

/// The passes on a program that is not cut any further; what they made is verified.
fn finished(program: &Program) -> Result<Program, IrError> {
    let program = fuse(&sort_free(&dead_code_and_inputs(program)));
    verify(&program)?;
    Ok(program)
}
