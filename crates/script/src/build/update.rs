//! The program that updates what a rank keeps of a unit.
//!
//! Most rules are one op that treats each element alone. LAMB also needs the norms of whole parameters:
//! ranks sum the squares of what they hold of each, and exchange two numbers per parameter.

use phalanx_ir::ops::{
    Collective, CollectiveKind, CompareKind, Decay, MemberScale, MemberSquares, Narrow,
};
use phalanx_ir::{Axis, Builder, DType, Mesh, Program, Role, Tensor};
use phalanx_spmd::Share;

use super::{Optimizer, Precision, ScriptError, Unit};

/// Updates what a rank keeps of a unit: inputs w, g, the states, lr, step and clip, and `go` if
/// steps may change nothing; outputs w, the states and the narrow copy, if there is one.
pub(super) fn update(
    unit: &Unit,
    precision: Precision,
    optimizer: Optimizer,
    guarded: bool,
    mesh: &Mesh,
) -> Result<Program, ScriptError> {
    let b = Builder::on("update", precision.state, mesh.clone());
    // A rank that updates for all does so on a mesh without those others.
    let ty = |dtype: DType| match unit.facts.state.share {
        Share::Root => unit.whole(dtype, mesh),
        Share::Whole | Share::Shard => unit.updated(dtype, mesh),
    };
    let buffer = |name: &str, role: Role, dtype: DType| b.input(name, role, ty(dtype));
    let w = buffer("w", Role::State, precision.state);
    let mut operands = vec![w, buffer("g", Role::Gradient, precision.grads)];
    for i in 0..optimizer.states() {
        operands.push(buffer(&format!("s{i}"), Role::State, precision.state));
    }
    let lr = b.scalar("lr");
    operands.extend([lr, b.scalar("step"), b.scalar("clip")]);
    operands.extend(guarded.then(|| b.scalar("go")));
    let narrow = match precision.has_masters() {
        true => Narrow::Copy(precision.weights),
        false => Narrow::None,
    };
    let decays = |rate: f64| Decay { rate, first: unit.decays, block: unit.elements };
    let mut results = b.apply_all(optimizer.op(decays, narrow), &operands);
    if let Optimizer::Lamb { .. } = optimizer {
        results[0] = w - by_trust_ratio(unit, w, results[0]) * lr;
        results.extend(precision.has_masters().then(|| results[0].cast(precision.weights)));
    }
    for (i, value) in results.iter().enumerate() {
        b.port(&format!("o{i}"), Role::State, *value);
    }
    Ok(b.finish()?)
}

/// A direction, of which each parameter's part is scaled to the parameter's own norm; as it is where
/// one of the two is zero.
fn by_trust_ratio<'b>(unit: &Unit, w: Tensor<'b>, direction: Tensor<'b>) -> Tensor<'b> {
    let (b, bounds) = (w.builder(), unit.bounds());
    let members = bounds.members.len();
    let squares = [w, direction].map(|x| b.apply(MemberSquares { bounds: bounds.clone() }, &[x]));
    let axes: Vec<Axis> = squares[0].ty().layout.partial().iter().copied().collect();
    let mut both = b.concat(&squares, 0);
    if !axes.is_empty() {
        both = b.apply(Collective::new(CollectiveKind::AllReduce, axes), &[both]);
    }
    let [of_w, of_direction] = [0, 1].map(|i| both.slice(0, i * members, members).sqrt());
    let dtype = both.dtype();
    let [zero, one] = [0.0, 1.0].map(|x| b.constant(dtype, [members], x));
    let known = of_w.min(of_direction).compare(CompareKind::Gt, zero);
    let ratio = known.select(of_w / of_direction, one);
    b.apply(MemberScale { bounds }, &[direction, ratio])
}
