//! From a model to the programs of its segments.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, Phases, Recompute, joint, slice};
use phalanx_ir::{DType, Model, Program};
use phalanx_passes::{chunk_loss, common, dead_code, fold_add, fuse, sort_free};
use phalanx_script::Compiled;

/// The plain programs of every segment, as reverse mode forms them.
pub fn compile(model: &Model, grads: DType, recompute: Recompute) -> Compiled {
    let phases = |program: &Program| slice(&joint(program, grads).unwrap(), recompute);
    Compiled {
        phases: model.segments().iter().map(phases).collect(),
    }
}

/// The same after every pass, with losses in chunks of a few rows so that chunking shows on small
/// models.
pub fn optimise(model: &Model, grads: DType, recompute: Recompute) -> Compiled {
    let chunk = NonZeroUsize::new(5).unwrap();
    let phases = |forward: &Program| {
        let program = joint(forward, grads).unwrap().program;
        let program = fold_add(&chunk_loss(&common(&program), chunk));
        let Phases { f, b, w, bw, fbw } = slice(&Joint { program }, recompute);
        let finish = |program: Program| dead_code(&fuse(&sort_free(&program)));
        Phases {
            f: finish(f),
            b: finish(b),
            w: finish(w),
            bw: finish(bw),
            fbw: finish(fbw),
        }
    };
    Compiled {
        phases: model.segments().iter().map(phases).collect(),
    }
}
