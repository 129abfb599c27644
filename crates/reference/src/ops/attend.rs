//! One step of an attention whose keys come in parts, from its definition.

use phalanx_ir::ops::{Attend, AttendGrad};

use super::Call;
use super::attention::Sizes;
use super::softmax::log_sum_exp;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

/// The attention over the keys that are here, and over those before: both weighted by the share that
/// they have of the sum of all exponentials.
pub(super) fn attend(op: &Attend, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (q, k, v) = (call.floats(0)?, call.floats(1)?, call.floats(2)?);
    let sizes = Sizes::of(&op.of, call, if op.goes_on { 5 } else { 3 })?;
    let (mut totals, mut probabilities, mut before) = (Vec::new(), Vec::new(), Vec::new());
    for (row, query) in sizes.queries().enumerate() {
        let mut scores = sizes.scores(q, k, query);
        if op.goes_on {
            scores.push(call.floats(4)?[row]);
        }
        let total = log_sum_exp(&scores);
        let mut shares = sizes.spread(&scores, total);
        before.extend(op.goes_on.then(|| shares.pop()).flatten());
        totals.push(total);
        probabilities.extend(shares);
    }
    let mut o = sizes.weigh(&sizes.drop(&probabilities), v);
    if op.goes_on {
        let earlier = call.floats(3)?;
        for (row, query) in sizes.queries().enumerate() {
            let start = sizes.query(query);
            for x in start..start + sizes.d {
                o[x] += before[row] * earlier[x];
            }
        }
    }
    Ok(vec![call.result(0, o), call.result(1, totals)])
}

/// The gradient by the keys that are here, added to what was found before.
pub(super) fn attend_grad(
    op: &AttendGrad,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (q, k, v) = (call.floats(0)?, call.floats(1)?, call.floats(2)?);
    let (o, totals, dy) = (call.floats(3)?, call.floats(4)?, call.floats(5)?);
    let sizes = Sizes::of(&op.of, call, if op.goes_on { 9 } else { 6 })?;
    let so_far = |i: usize, len: usize| match op.goes_on {
        true => call.floats(i).map(<[f64]>::to_vec),
        false => Ok(vec![0.0; len]),
    };
    let mut dq = so_far(6, q.len())?;
    let (mut dk, mut dv) = (so_far(7, k.len())?, so_far(8, v.len())?);
    let probabilities = sizes.probabilities(q, k, totals);
    let dropped = sizes.drop(&probabilities);
    for query in sizes.queries() {
        let (row, qs, keys) = (sizes.row(query), sizes.query(query), sizes.keys(query));
        let (p, dropped) = (&probabilities[row.clone()], &dropped[row]);
        // Over all keys, not only those that are here.
        let along = super::attention::dot(&dy[qs..], &o[qs..], sizes.d);
        for j in 0..sizes.t {
            let dp =
                sizes.kept(query, j) * super::attention::dot(&dy[qs..], &v[keys(j)..], sizes.d);
            let ds = p[j] * (dp - along) * sizes.scale();
            for x in 0..sizes.d {
                dq[qs + x] += ds * k[keys(j) + x];
                dk[keys(j) + x] += ds * q[qs + x];
                dv[keys(j) + x] += dropped[j] * dy[qs + x];
            }
        }
    }
    Ok(vec![call.result(0, dq), call.result(1, dk), call.result(2, dv)])
}
