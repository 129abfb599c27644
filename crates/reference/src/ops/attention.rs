//! Scaled dot-product attention, one query at a time.

use phalanx_ir::ops::{Attention, AttentionKind};
use phalanx_ir::random::keeps;

use super::Call;
use super::softmax::log_sum_exp;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn attention(op: &Attention, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (q, k, v) = (call.floats(0)?, call.floats(1)?, call.floats(2)?);
    let sizes = Sizes::of(op, call, 3)?;
    let (mut totals, mut probabilities) = (Vec::new(), Vec::new());
    for query in sizes.queries() {
        let scores = sizes.scores(q, k, query);
        let total = log_sum_exp(&scores);
        totals.push(total);
        probabilities.extend(sizes.spread(&scores, total));
    }
    if op.kind == AttentionKind::Flash {
        let dropped = sizes.drop(&probabilities);
        let o = call.result(0, sizes.weigh(&dropped, v));
        return Ok(vec![o, call.result(1, totals)]);
    }
    // Stored probabilities are rounded, and the rounded ones are multiplied with the values.
    let mut results = vec![call.result(1, probabilities)];
    if op.drops() {
        results.push(call.result(2, sizes.drop(&results[0].values())));
    }
    let last = results[results.len() - 1].values();
    results.insert(0, call.result(0, sizes.weigh(&last, v)));
    Ok(results)
}

pub(super) fn attention_grad(
    op: &Attention,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (q, k, v) = (call.floats(0)?, call.floats(1)?, call.floats(2)?);
    let last = call.ins.len() - 1 - usize::from(op.drops());
    let (dy, sizes) = (call.floats(last)?, Sizes::of(op, call, last + 1)?);
    let (probabilities, dropped) = match op.kind {
        AttentionKind::Flash => {
            let p = sizes.probabilities(q, k, call.floats(4)?);
            let dropped = sizes.drop(&p);
            (p, dropped)
        }
        AttentionKind::Materialised => (call.floats(4)?.to_vec(), call.floats(last - 1)?.to_vec()),
    };
    let [mut dq, mut dk, mut dv] = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
    for query in sizes.queries() {
        let row = sizes.row(query);
        let (p, dropped) = (&probabilities[row.clone()], &dropped[row]);
        let (qs, keys) = (sizes.query(query), sizes.keys(query));
        let dp: Vec<f64> = (0..sizes.t)
            .map(|j| sizes.kept(query, j) * dot(&dy[qs..], &v[keys(j)..], sizes.d))
            .collect();
        let along: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for j in 0..sizes.t {
            let ds = p[j] * (dp[j] - along) * sizes.scale();
            for x in 0..sizes.d {
                dq[qs + x] += ds * k[keys(j) + x];
                dk[keys(j) + x] += ds * q[qs + x];
                dv[keys(j) + x] += dropped[j] * dy[qs + x];
            }
        }
    }
    Ok(vec![call.result(0, dq), call.result(1, dk), call.result(2, dv)])
}

/// One query: its sequence, its head, its place.
#[derive(Clone, Copy)]
pub(super) struct Query {
    b: usize,
    h: usize,
    i: usize,
}

/// The sizes of an attention, and which keys count: everything except the numbers.
pub(super) struct Sizes {
    b: usize,
    s: usize,
    h: usize,
    pub(super) d: usize,
    pub(super) t: usize,
    groups: usize,
    op: Attention,
    key: [i32; 5],
}

impl Sizes {
    /// The sizes of a call whose random key, if there is one, is operand `key`.
    pub(super) fn of(op: &Attention, call: &Call<'_>, key: usize) -> Result<Self, ReferenceError> {
        let (q, k) = (call.shape(0), call.shape(1));
        Ok(Self {
            b: q[0],
            s: q[1],
            h: q[2],
            d: q[3],
            t: k[1],
            groups: k[2],
            op: *op,
            key: if op.drops() { call.key(key)? } else { [0; 5] },
        })
    }

    /// All queries, in the order of the rows of probabilities.
    pub(super) fn queries(&self) -> impl Iterator<Item = Query> {
        let (b, h, s) = (self.b, self.h, self.s);
        (0..b).flat_map(move |b| (0..h).flat_map(move |h| (0..s).map(move |i| Query { b, h, i })))
    }

    /// Where a query begins in q and o.
    pub(super) fn query(&self, at: Query) -> usize {
        ((at.b * self.s + at.i) * self.h + at.h) * self.d
    }

    /// Where key and value `j` of a query's key head begin in k and v.
    pub(super) fn keys(&self, at: Query) -> impl Fn(usize) -> usize {
        let (t, groups, d) = (self.t, self.groups, self.d);
        let head = at.h * groups / self.h;
        move |j| ((at.b * t + j) * groups + head) * d
    }

    /// The query's row of probabilities.
    pub(super) fn row(&self, at: Query) -> std::ops::Range<usize> {
        let row = (at.b * self.h + at.h) * self.s + at.i;
        row * self.t..(row + 1) * self.t
    }

    /// Whether a query sees key `j`: the last query sees the last key, so both ends align.
    fn sees(&self, at: Query, j: usize) -> bool {
        !self.op.causal || j + self.s <= at.i + self.t
    }

    pub(super) fn scale(&self) -> f64 {
        1.0 / (self.d as f64).sqrt()
    }

    /// The scaled scores of a query; −∞ for keys that it does not see.
    pub(super) fn scores(&self, q: &[f64], k: &[f64], at: Query) -> Vec<f64> {
        let (start, keys) = (self.query(at), self.keys(at));
        (0..self.t)
            .map(|j| match self.sees(at, j) {
                true => dot(&q[start..], &k[keys(j)..], self.d) * self.scale(),
                false => f64::NEG_INFINITY,
            })
            .collect()
    }

    /// The probabilities of scores; zeros for a query that sees no key.
    pub(super) fn spread(&self, scores: &[f64], total: f64) -> Vec<f64> {
        (scores.iter())
            .map(|&score| match score == f64::NEG_INFINITY {
                true => 0.0,
                false => (score - total).exp(),
            })
            .collect()
    }

    /// All probabilities, recomputed from the log-sum-exp of each row.
    pub(super) fn probabilities(&self, q: &[f64], k: &[f64], totals: &[f64]) -> Vec<f64> {
        (self.queries().zip(totals))
            .flat_map(|(query, &total)| self.spread(&self.scores(q, k, query), total))
            .collect()
    }

    /// The factor by which dropout multiplies a probability.
    pub(super) fn kept(&self, at: Query, j: usize) -> f64 {
        if !self.op.drops() {
            return 1.0;
        }
        let element = (at.h * self.s + at.i) * self.t + j;
        let (row, p) = (at.b as u64, self.op.dropout);
        match keeps(self.key, self.op.site, row, element as u64, p) {
            true => 1.0 / (1.0 - p),
            false => 0.0,
        }
    }

    /// All probabilities after dropout.
    pub(super) fn drop(&self, probabilities: &[f64]) -> Vec<f64> {
        (self.queries())
            .flat_map(|query| {
                let row = &probabilities[self.row(query)];
                (row.iter().enumerate()).map(move |(j, p)| p * self.kept(query, j))
            })
            .collect()
    }

    /// The sum of the values, weighted by the probabilities: o.
    pub(super) fn weigh(&self, probabilities: &[f64], v: &[f64]) -> Vec<f64> {
        let mut o = vec![0.0; self.b * self.s * self.h * self.d];
        for query in self.queries() {
            let (start, keys) = (self.query(query), self.keys(query));
            for (j, p) in probabilities[self.row(query)].iter().enumerate() {
                for x in 0..self.d {
                    o[start + x] += p * v[keys(j) + x];
                }
            }
        }
        o
    }
}

pub(super) fn dot(a: &[f64], b: &[f64], n: usize) -> f64 {
    a[..n].iter().zip(&b[..n]).map(|(a, b)| a * b).sum()
}
