//! The loss scale of the next step, decided where programs run.
//!
//! After an overflow the count of good steps starts again; the scale is halved, unless there is
//! hysteresis left, which is used up first. After a window of good steps the scale is doubled and
//! the hysteresis is full again. A step that is taken again, because rows of experts found no room, decides nothing.

use phalanx_ir::ops::CompareKind;
use phalanx_ir::{Builder, DType, Program, Role, Tensor};

use super::finish::{push, whole};
use super::{BufferId, Script, ScriptError, StateScalar, TrainingScript};
use crate::scaling::{LossScaling, ScaleRule};

/// Appends the new loss scale and counts. It runs before the updates, which read the number of steps
/// that were applied, this one included.
pub(super) fn append(
    script: &mut Script,
    scalars: &[StateScalar],
    training: &TrainingScript<'_>,
    scaling: LossScaling,
    (go, lacks): (BufferId, Option<BufferId>),
) -> Result<(), ScriptError> {
    let kept: Vec<_> = scalars.iter().map(|scalar| whole(scalar.buffer)).collect();
    let program = program(scaling, training.precision.state, lacks.is_some())?;
    let program = training.world.library.placed(&program);
    let told = [go].into_iter().chain(lacks).map(whole);
    let inputs = told.chain(kept.iter().copied()).collect();
    push(script, "loss scale", program, inputs, &kept, None);
    Ok(())
}

/// From `go`, how many rows found no room, and the four numbers to the new numbers.
fn program(scaling: LossScaling, dtype: DType, bounded: bool) -> Result<Program, ScriptError> {
    let b = Builder::new("loss_scale", dtype);
    let go = b.scalar("go");
    let lacks = bounded.then(|| b.scalar("lacking"));
    let old = scaling.scalars().map(|(scalar, _)| b.scalar(scalar.name()));
    let [scale, good, left, applied] = old;
    let new = match scaling.rule {
        None => [scale, good, left],
        Some(rule) => ruled(&b, rule, go, [scale, good, left]),
    };
    let new = match lacks.filter(|_| scaling.rule.is_some()) {
        None => new,
        Some(lacks) => {
            let again = lacks.compare(CompareKind::Gt, b.constant(dtype, [], 0.0));
            // Copies: new numbers are written over the old ones, which nothing may read any more.
            let kept = [scale, good, left].map(|old| old.scale(1.0));
            std::array::from_fn(|i| again.select(kept[i], new[i]))
        }
    };
    for (value, (scalar, _)) in new.into_iter().chain([applied + go]).zip(scaling.scalars()) {
        b.port(scalar.name(), Role::State, value);
    }
    Ok(b.finish()?)
}

fn ruled<'b>(
    b: &'b Builder,
    rule: ScaleRule,
    go: Tensor<'b>,
    [scale, good, left]: [Tensor<'b>; 3],
) -> [Tensor<'b>; 3] {
    let number = |x: f64| b.constant(go.dtype(), [], x);
    let (zero, all) = (number(0.0), number(rule.hysteresis as f64));
    let went = go.compare(CompareKind::Gt, zero);
    // After a good step.
    let count = good + 1.0;
    let full = count.compare(CompareKind::Ge, number(rule.window as f64));
    let grown = [full.select(scale * 2.0, scale), full.select(zero, count), full.select(all, left)];
    // After an overflow.
    let halves = left.compare(CompareKind::Le, number(1.0));
    let half = (scale * 0.5).max(number(rule.least));
    let shrunk = [halves.select(half, scale), zero, halves.select(left, left - 1.0)];
    std::array::from_fn(|i| went.select(grown[i], shrunk[i]))
}
