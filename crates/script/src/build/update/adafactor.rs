//! Adafactor (Shazeer and Stern, 2018): second moments that cost a number for each row and column.
//!
//! The squares of a matrix's gradient are estimated by the outer product of the means R of its rows and C of
//! its columns, V̂ = R·C / mean(R), which is the best such estimate (in generalised Kullback-Leibler
//! divergence). A vector is a matrix of one column, where this is exact. With β = 1 − t^−0.8, both are
//! running means of g² + ε₁. The direction U = g/√V̂ is scaled to a root mean square of at most d, and the
//! step is relative to the parameter: ρ·max(ε₂, RMS(w)), with ρ = min(lr, 1/√t).
//!
//! Where ranks hold parts of a unit, they exchange one number for each row and column, and two for each
//! parameter; all keep the same means.

use phalanx_ir::ops::{
    Bounds, CompareKind, FactorDirection, FactorMeans, MemberScale, MemberSquares,
};
use phalanx_ir::{Builder, Tensor};

use super::{Optimizer, StepScalars, Unit, member_squares, summed};

/// New weights and means; from weights and gradient, and the means of rows and columns.
pub(super) fn update<'b>(
    unit: &Unit,
    rule: Optimizer,
    [w, g]: [Tensor<'b>; 2],
    means: [Tensor<'b>; 2],
    scalars: StepScalars<'b>,
) -> Vec<Tensor<'b>> {
    let Optimizer::Adafactor { eps, least, longest, decay } = rule else {
        unreachable!("other rules are single ops")
    };
    let StepScalars { lr, step, clip, go } = scalars;
    let (b, dtype, bounds) = (w.builder(), w.dtype(), unit.bounds());
    let [rows, columns] = new_means(unit, g, means, scalars, eps);
    let roots = [by_mean(unit, rows.sqrt()), columns.sqrt()];
    let direction = FactorDirection { factors: unit.factors.clone() };
    let operands: Vec<_> = [g, roots[0], roots[1], clip].into_iter().chain(go).collect();
    let direction = b.apply(direction, &operands);
    let members = bounds.members.len();
    let each = |x: f64| b.constant(dtype, [members], x);
    let elements = unit.factors.members.iter().map(|m| m.sizes.iter().product::<usize>() as f64);
    let counts = constants(b, w, elements);
    let [of_w, of_direction] =
        member_squares(&bounds, [w, direction]).map(|squares| (squares / counts).sqrt());
    let rate = lr.min(b.constant(dtype, [], 1.0) / step.sqrt());
    let by = of_w.max(each(least)) * rate / of_direction.scale(1.0 / longest).max(each(1.0));
    let mut new = w - b.apply(MemberScale { bounds: bounds.clone() }, &[direction, by]);
    if decay > 0.0 {
        let decays = bounds.members.iter().map(|m| if m.0 < unit.decays { decay } else { 0.0 });
        let share = constants(b, w, decays) * go.map_or(lr, |go| lr * go);
        new = new - b.apply(MemberScale { bounds }, &[w, share]);
    }
    vec![new, rows, columns]
}

/// The running means after this step; where it changes nothing, as they were.
fn new_means<'b>(
    unit: &Unit,
    g: Tensor<'b>,
    old: [Tensor<'b>; 2],
    StepScalars { step, clip, go, .. }: StepScalars<'b>,
    eps: f64,
) -> [Tensor<'b>; 2] {
    let b = g.builder();
    let found = b.apply_all(FactorMeans { factors: unit.factors.clone() }, &[g]);
    let found = (summed(b.concat(&found, 0)) * (clip * clip)).shift(eps);
    let old = b.concat(&old, 0);
    let fresh = step.log().scale(-0.8).exp();
    let mut new = old * fresh.scale(-1.0).shift(1.0) + found * fresh;
    let [rows, columns] = unit.factors.totals();
    if let Some(go) = go {
        let zero = b.constant(go.dtype(), [rows + columns], 0.0);
        let goes = go.broadcast([rows + columns], &[0]).compare(CompareKind::Gt, zero);
        new = goes.select(new, old);
    }
    [new.slice(0, 0, rows), new.slice(0, rows, columns)]
}

/// Roots of the rows' means, divided by the root of their mean over the rows of each matrix.
fn by_mean<'b>(unit: &Unit, roots: Tensor<'b>) -> Tensor<'b> {
    let (b, [block, _]) = (roots.builder(), unit.factors.totals());
    let spans: Vec<_> = unit.factors.matrices().map(|matrix| matrix.rows).collect();
    let counts = constants(b, roots, spans.iter().map(|rows| rows.len() as f64));
    let members = spans.into_iter().map(|rows| (rows.start, rows.end)).collect();
    let bounds = Bounds { members, block };
    let sums = b.apply(MemberSquares { bounds: bounds.clone() }, &[roots]);
    b.apply(MemberScale { bounds }, &[roots, (counts / sums).sqrt()])
}

/// A vector of these numbers, in the type of a value.
fn constants<'b>(b: &'b Builder, of: Tensor<'b>, each: impl Iterator<Item = f64>) -> Tensor<'b> {
    let each: Vec<f64> = each.collect();
    let runs = each.chunk_by(|x, y| x == y);
    let parts: Vec<_> = runs.map(|run| b.constant(of.dtype(), [run.len()], run[0])).collect();
    match &parts[..] {
        [one] => *one,
        several => b.concat(several, 0),
    }
}
