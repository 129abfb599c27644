//! Attention whose keys come in parts: steps that go on from earlier ones, and their gradients.

use phalanx_ir::DType;
use phalanx_ir::ops::{Attend, AttendGrad, Attention, AttentionKind, KeyForm, KeyProduct};

use crate::ops::each;

/// Two steps forward, and two of the gradient from what they left.
fn steps(causal: bool, [queries, keys, dim]: [usize; 3]) {
    each("steps", |b, dtype| {
        let of = Attention { kind: AttentionKind::Flash, causal, dropout: 0.0, site: 0 };
        let q = b.data("q", dtype, [2, queries, 4, dim]);
        let key = |name: &str| b.data(name, dtype, [2, keys, 2, dim]);
        let (k, v, more_k, more_v) = (key("k"), key("v"), key("more_k"), key("more_v"));
        let first = b.apply_all(Attend { of, goes_on: false }, &[q, k, v]);
        let given = [q, more_k, more_v, first[0], first[1]];
        let both = b.apply_all(Attend { of, goes_on: true }, &given);
        b.probe("o", both[0]);
        b.probe("lse", both[1]);
        let o =
            if dtype == DType::Bf16 || dtype == DType::F16 { both[0].cast(dtype) } else { both[0] };
        let d_o = b.data("d_o", dtype, [2, queries, 4, dim]);
        let found = b.apply_all(AttendGrad { of, goes_on: false }, &[q, k, v, o, both[1], d_o]);
        let given = [q, more_k, more_v, o, both[1], d_o, found[0], found[1], found[2]];
        let found = b.apply_all(AttendGrad { of, goes_on: true }, &given);
        for (name, gradient) in ["dq", "dk", "dv"].into_iter().zip(found) {
            b.probe(name, gradient);
        }
    });
}

#[test]
fn steps_go_on_from_earlier_ones() {
    for causal in [false, true] {
        steps(causal, [9, 9, 6]);
        // Several tiles of queries, and keys that are no whole panels.
        steps(causal, [70, 70, 24]);
    }
    steps(false, [53, 131, 16]);
}

/// Products with stored scores, first steps and later ones.
#[test]
fn products_with_stored_scores() {
    for [queries, keys, dim] in [[5, 7, 6], [53, 70, 24]] {
        each("key_products", |b, dtype| {
            let wide = dtype.accumulator();
            let q = b.data("q", dtype, [2, queries, 4, dim]);
            let k = b.data("k", dtype, [2, keys, 2, dim]);
            let p = b.data("p", dtype, [2, 4, queries, keys]);
            let forms = [
                (KeyForm::Scores, [q, k], "scores", [2, 4, queries, keys]),
                (KeyForm::Weighted, [p, k], "weighted", [2, queries, 4, dim]),
                (KeyForm::Sums, [p, q], "sums", [2, keys, 2, dim]),
            ];
            for (form, [left, right], name, shape) in forms {
                let of = |goes_on| KeyProduct { form, key_heads: 2, causal: false, goes_on };
                let before = b.data(&format!("{name} so far"), wide, shape);
                b.probe(name, b.apply(of(false), &[left, right]));
                let both = b.apply(of(true), &[left, right, before]);
                b.probe(&format!("{name} of both"), both);
            }
        });
    }
}
