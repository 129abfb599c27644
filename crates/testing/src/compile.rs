//! From a model to the programs of its segments.

use std::num::NonZeroUsize;

use phalanx_autodiff::{Joint, Phases, Recompute, joint, slice};
use phalanx_ir::{DType, Model, Program};
use phalanx_passes::{chunk_loss, common, dead_code_and_inputs, fold_add, fuse, sort_free};
use phalanx_script::Compiled;

/// The plain programs of every segment, as reverse mode forms them.
pub fn compile(model: &Model, grads: DType, recompute: Recompute) -> Compiled {
    let phases = |program: &Program| slice(&joint(program, grads).unwrap(), recompute);
    Compiled { phases: model.segments().iter().map(phases).collect() }
}

/// The same after every pass, as a trainer runs them: where forward and backward are one program,
/// the loss is in chunks, here of a few rows, so that small models have several.
pub fn optimise(model: &Model, grads: DType, recompute: Recompute) -> Compiled {
    let chunk = NonZeroUsize::new(5).unwrap();
    let finish = |program: &Program| fuse(&sort_free(&dead_code_and_inputs(program)));
    let cut = |program: &Program| {
        let program = fold_add(program);
        slice(&Joint { program }, recompute)
    };
    let phases = |forward: &Program| {
        let whole = common(&joint(forward, grads).unwrap().program);
        let Phases { f, b, w, bw, .. } = cut(&whole);
        let fbw = cut(&chunk_loss(&whole, chunk)).fbw;
        let [f, b, w, bw, fbw] = [f, b, w, bw, fbw].map(|program| finish(&program));
        Phases { f, b, w, bw, fbw }
    };
    Compiled { phases: model.segments().iter().map(phases).collect() }
}
