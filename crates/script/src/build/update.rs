//! The program that updates what a rank keeps of a unit.
//!
//! Most rules are one op that treats each element alone. LAMB also needs the norms of whole parameters:
//! ranks sum the squares of what they hold of each, and exchange two numbers per parameter. Adafactor
//! needs them too, and sums over rows and columns.

mod adafactor;

use phalanx_ir::ops::{
    Bounds, Collective, CollectiveKind, CompareKind, Decay, MemberScale, MemberSquares,
};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, Tensor};
use phalanx_spmd::Share;

use super::{Optimizer, Precision, ScriptError, Unit};
use crate::factored::StateOf;

/// Which results of an update are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Results {
    /// All of them.
    All,
    /// Only what programs read: weights, or their narrow copy.
    Weights,
}

/// Updates what a rank keeps of a unit: inputs w, g, lower halves of w if it is split, the states, lr, step and
/// clip, and `go` if steps may change nothing; outputs w, lower halves, the states and the narrow copy, if there
/// is one.
pub(super) fn update(
    unit: &Unit,
    precision: Precision,
    optimizer: Optimizer,
    (guarded, kept): (bool, Results),
    mesh: &Mesh,
) -> Result<Program, ScriptError> {
    let b = Builder::on("update", precision.state, mesh.clone());
    // A rank that updates for all does so on a mesh without those others.
    let ty = |dtype: DType| match unit.facts.state.share {
        Share::Root => unit.whole(dtype, mesh),
        Share::Whole | Share::Shard => unit.updated(dtype, mesh),
    };
    let stored = if precision.split { precision.weights } else { precision.state };
    let w = b.input("w", Role::State, ty(stored));
    let g = b.input("g", Role::Gradient, ty(precision.grads));
    let lower = precision.split.then(|| b.input("low", Role::State, ty(precision.masters())));
    let states: Vec<Tensor<'_>> = (0..optimizer.states())
        .map(|i| {
            let of = match optimizer.state_of(i) {
                StateOf::Elements => ty(precision.state),
                of => unit.state(of, precision.state, mesh),
            };
            b.input(&format!("s{i}"), Role::State, of)
        })
        .collect();
    let [lr, step, clip] = ["lr", "step", "clip"].map(|name| b.scalar(name));
    let go = guarded.then(|| b.scalar("go"));
    let decays = |rate: f64| Decay { rate, first: unit.decays, block: unit.elements };
    let mut operands = vec![w, g];
    operands.extend(lower);
    operands.extend(states.iter().copied().chain([lr, step, clip]).chain(go));
    let mut results = match (optimizer, optimizer.op(decays, precision.narrow())) {
        (Optimizer::Lamb { .. }, Some(op)) => {
            let mut results = b.apply_all(op, &operands);
            results[0] = w - by_trust_ratio(unit, w, results[0]) * lr;
            results
        }
        (_, Some(op)) => b.apply_all(op, &operands),
        (rule, None) => {
            let numbers = StepScalars { lr, step, clip, go };
            adafactor::update(unit, rule, [w, g], [states[0], states[1]], numbers)
        }
    };
    if results.len() == 1 + states.len() {
        results.extend(precision.has_masters().then(|| results[0].cast(precision.weights)));
    }
    if kept == Results::Weights {
        // Narrow copies come last; halves of masters come after the weights.
        let copied = precision.has_masters() && !precision.split;
        let read = if copied { results.len() - 1 } else { 0 };
        results = vec![results[read]];
    }
    for (i, value) in results.iter().enumerate() {
        b.port(&format!("o{i}"), Role::State, *value);
    }
    Ok(b.finish()?)
}

/// The scalars of a step.
#[derive(Clone, Copy)]
struct StepScalars<'b> {
    lr: Tensor<'b>,
    step: Tensor<'b>,
    clip: Tensor<'b>,
    /// Where it is 0, nothing changes.
    go: Option<Tensor<'b>>,
}

/// A direction, of which each parameter's part is scaled to the parameter's own norm; as it is where
/// one of the two is zero.
fn by_trust_ratio<'b>(unit: &Unit, w: Tensor<'b>, direction: Tensor<'b>) -> Tensor<'b> {
    let (b, bounds) = (w.builder(), unit.bounds());
    let members = bounds.members.len();
    let [of_w, of_direction] = member_squares(&bounds, [w, direction]).map(Tensor::sqrt);
    let dtype = of_w.dtype();
    let [zero, one] = [0.0, 1.0].map(|x| b.constant(dtype, [members], x));
    let known = of_w.min(of_direction).compare(CompareKind::Gt, zero);
    let ratio = known.select(of_w / of_direction, one);
    b.apply(MemberScale { bounds }, &[direction, ratio])
}

/// The sum of squares of each parameter in two units, over all ranks that hold parts of it.
fn member_squares<'b>(bounds: &Bounds, units: [Tensor<'b>; 2]) -> [Tensor<'b>; 2] {
    let b = units[0].builder();
    let squares = units.map(|x| b.apply(MemberSquares { bounds: bounds.clone() }, &[x]));
    let both = summed(b.concat(&squares, 0));
    let members = bounds.members.len();
    [0, 1].map(|i| both.slice(0, i * members, members))
}

/// A value that ranks hold as a partial sum, on all of them.
fn summed(value: Tensor<'_>) -> Tensor<'_> {
    let axes: Vec<Axis> = value.ty().layout.partial().iter().copied().collect();
    match axes.is_empty() {
        true => value,
        false => value.builder().apply(Collective::new(CollectiveKind::AllReduce, axes), &[value]),
    }
}
