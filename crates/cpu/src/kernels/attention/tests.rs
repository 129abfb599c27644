//! Attention against a naive version in double precision, whose gradients agree with differences.

use half::bf16;
use phalanx_ir::random::keeps;

use super::*;
use crate::element::{CpuElement, CpuFloat};
use crate::kernels::gemm::Packing;
use crate::kernels::testing::{doubles, random};
use crate::products::tests::kernels;
use crate::products::{MicroKernel, PanelElement};

const SMALL: AttentionShape = AttentionShape {
    batch: 2,
    queries: 5,
    keys: 5,
    kv_heads: 2,
    group: 1,
    dim: 8,
    causal: true,
    scale: 0.4,
    held: None,
};

const DROPOUT: Mask = Mask { key: [11, -12, 13, 14, 4], site: 6, p: 0.3 };

/// All tensors of one attention, computed by the kernels in shares of the pairs.
struct Computed<T: CpuElement> {
    o: Vec<T>,
    lse: Vec<T::Acc>,
    probabilities: Vec<T>,
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

struct Inputs {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
}

impl Inputs {
    /// Normal numbers, rounded to `T`.
    fn random<T: CpuElement>(shape: &AttentionShape) -> Self {
        let tensor = |name: &str, positions: usize, heads: usize| {
            let len = shape.batch * positions * heads * shape.dim;
            doubles(&random::<T>(name, len, 1.0))
        };
        Self {
            q: tensor("q", shape.queries, shape.heads()),
            k: tensor("k", shape.keys, shape.kv_heads),
            v: tensor("v", shape.keys, shape.kv_heads),
            d_o: tensor("do", shape.queries, shape.heads()),
        }
    }
}

/// What computes some pairs: forward and backward.
type Run<'a, T> = &'a dyn Fn(
    AttentionKernel<'_, Packing>,
    (&ForwardTensors<T>, &BackwardTensors<T>, *mut T),
    Range<usize>,
);

/// With the library.
fn compute<T: CpuElement>(
    shape: AttentionShape,
    dropout: Option<Mask>,
    inputs: &Inputs,
    materialised: bool,
) -> Computed<T> {
    let scratch = |len: usize| vec![T::Acc::from_f64(f64::NAN); len];
    compute_with(shape, dropout, inputs, &|attention, (forward, backward, stored), pairs| {
        let room = match materialised {
            true => shape.forward_materialised_scratch(),
            false => shape.forward_scratch(),
        };
        let (mut room, mut more) = (scratch(room), scratch(shape.backward_scratch()));
        // SAFETY: the tensors have the sizes of the shape and are used here alone.
        unsafe {
            if materialised {
                attention.forward_materialised(forward, stored, pairs.clone(), &mut room);
                attention.backward_materialised(backward, stored, pairs, &mut more);
            } else {
                attention.forward(forward, pairs.clone(), &mut room);
                attention.backward(backward, pairs, &mut more);
            }
        }
    })
}

/// With own products of a unit.
fn compute_own<E: PanelElement>(
    shape: AttentionShape,
    dropout: Option<Mask>,
    inputs: &Inputs,
    unit: MicroKernel,
) -> Computed<E> {
    compute_with(shape, dropout, inputs, &|attention, (forward, backward, _), pairs| {
        let attention = OwnAttention { attention, unit };
        let mut room = vec![u32::MAX; attention.forward_scratch::<E>()];
        let mut more = vec![u32::MAX; attention.backward_scratch::<E>()];
        // SAFETY: as above.
        unsafe {
            attention.forward(forward, pairs.clone(), &mut room);
            attention.backward(backward, pairs, &mut more);
        }
    })
}

fn compute_with<T: CpuElement>(
    shape: AttentionShape,
    dropout: Option<Mask>,
    inputs: &Inputs,
    run: Run<'_, T>,
) -> Computed<T> {
    let convert =
        |x: &[f64]| -> Vec<T> { x.iter().map(|x| T::store(T::Acc::from_f64(*x))).collect() };
    let (q, k, v) = (convert(&inputs.q), convert(&inputs.k), convert(&inputs.v));
    let d_o = convert(&inputs.d_o);
    // Results start as NaN, so that an element that is never written is found.
    let nan = T::store(T::Acc::from_f64(f64::NAN));
    let scores = shape.batch * shape.heads() * shape.queries;
    let mut computed = Computed {
        o: vec![nan; q.len()],
        lse: vec![T::Acc::from_f64(f64::NAN); scores],
        probabilities: vec![nan; scores * shape.keys],
        dq: vec![nan; q.len()],
        dk: vec![nan; k.len()],
        dv: vec![nan; k.len()],
    };
    let attention = AttentionKernel { shape, dropout, gemm: &Packing };
    let forward = ForwardTensors {
        q: q.as_ptr(),
        k: k.as_ptr(),
        v: v.as_ptr(),
        o: computed.o.as_mut_ptr(),
        lse: computed.lse.as_mut_ptr(),
        before: None,
    };
    let backward = BackwardTensors {
        q: forward.q,
        k: forward.k,
        v: forward.v,
        o: forward.o,
        lse: forward.lse,
        d_o: d_o.as_ptr(),
        dq: computed.dq.as_mut_ptr(),
        dk: computed.dk.as_mut_ptr(),
        dv: computed.dv.as_mut_ptr(),
        before: None,
    };
    let probabilities = computed.probabilities.as_mut_ptr();
    let cut = shape.pairs() / 3;
    for pairs in [cut..shape.pairs(), 0..cut] {
        run(attention, (&forward, &backward, probabilities), pairs);
    }
    computed
}

/// Everything the kernels compute, straight from the definition, score by score.
#[derive(Default)]
struct Naive {
    o: Vec<f64>,
    lse: Vec<f64>,
    probabilities: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn naive(shape: AttentionShape, dropout: Option<Mask>, x: &Inputs) -> Naive {
    let (h, s, t) = (shape.heads(), shape.queries, shape.keys);
    let mut out = Naive {
        o: vec![0.0; x.q.len()],
        dq: vec![0.0; x.q.len()],
        dk: vec![0.0; x.k.len()],
        dv: vec![0.0; x.k.len()],
        ..Naive::default()
    };
    for row in 0..shape.batch * h * s {
        let (b, head, i) = (row / (h * s), row / s % h, row % s);
        let query = ((b * s + i) * h + head) * shape.dim;
        let keys = (0..t)
            .map(|j| ((b * t + j) * shape.kv_heads + head / shape.group) * shape.dim)
            .collect::<Vec<_>>();
        let dot = |a: &[f64], at: usize, b: &[f64], bt: usize| -> f64 {
            (0..shape.dim).map(|c| a[at + c] * b[bt + c]).sum()
        };
        let seen = |j: usize| !shape.causal || j + s <= i + t;
        let powers: Vec<f64> = (0..t)
            .map(|j| match seen(j) {
                true => (dot(&x.q, query, &x.k, keys[j]) * shape.scale).exp(),
                false => 0.0,
            })
            .collect();
        let sum: f64 = powers.iter().sum();
        out.lse.push(sum.ln());
        let p: Vec<f64> =
            powers.iter().map(|power| if sum > 0.0 { power / sum } else { 0.0 }).collect();
        let factor = |j: usize| match dropout {
            Some(Mask { key, site, p }) => {
                let element = ((head * s + i) * t + j) as u64;
                match keeps(key, site, b as u64, element, p) {
                    true => 1.0 / (1.0 - p),
                    false => 0.0,
                }
            }
            None => 1.0,
        };
        let dp: Vec<f64> = (0..t).map(|j| dot(&x.d_o, query, &x.v, keys[j]) * factor(j)).collect();
        let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for j in 0..t {
            let ds = p[j] * (dp[j] - mean) * shape.scale;
            for c in 0..shape.dim {
                out.o[query + c] += p[j] * factor(j) * x.v[keys[j] + c];
                out.dv[keys[j] + c] += p[j] * factor(j) * x.d_o[query + c];
                out.dq[query + c] += ds * x.k[keys[j] + c];
                out.dk[keys[j] + c] += ds * x.q[query + c];
            }
        }
        out.probabilities.extend(p);
    }
    out
}

fn compare<T: CpuElement>(what: &str, got: &[T], want: &[f64], tolerance: f64) {
    for (place, (got, want)) in got.iter().zip(want).enumerate() {
        let got = got.load().to_f64();
        let close = (got - want).abs() <= tolerance * (1.0 + want.abs());
        assert!(close || got == *want, "{what}[{place}]: {got} not {want}");
    }
}

fn check<T: CpuElement>(shape: AttentionShape, dropout: Option<Mask>, tolerance: f64) {
    let inputs = Inputs::random::<T>(&shape);
    let want = naive(shape, dropout, &inputs);
    for materialised in [false, true] {
        let computed = compute::<T>(shape, dropout, &inputs, materialised);
        compare("o", &computed.o, &want.o, tolerance);
        compare("lse", &computed.lse, &want.lse, tolerance);
        if materialised {
            compare("p", &computed.probabilities, &want.probabilities, tolerance);
        }
        compare("dq", &computed.dq, &want.dq, 2.0 * tolerance);
        compare("dk", &computed.dk, &want.dk, 2.0 * tolerance);
        compare("dv", &computed.dv, &want.dv, 2.0 * tolerance);
    }
}

/// Every unit of this processor and all emulated ones.
fn check_own<E: PanelElement>(shape: AttentionShape, dropout: Option<Mask>, tolerance: f64) {
    let inputs = Inputs::random::<E>(&shape);
    let want = naive(shape, dropout, &inputs);
    for (name, unit) in kernels(E::WORD) {
        let computed = compute_own::<E>(shape, dropout, &inputs, unit);
        let what = |part: &str| format!("{name}: {part}");
        compare(&what("o"), &computed.o, &want.o, tolerance);
        compare(&what("lse"), &computed.lse, &want.lse, tolerance);
        compare(&what("dq"), &computed.dq, &want.dq, 2.0 * tolerance);
        compare(&what("dk"), &computed.dk, &want.dk, 2.0 * tolerance);
        compare(&what("dv"), &computed.dv, &want.dv, 2.0 * tolerance);
    }
}

fn check_all_types(shape: AttentionShape, dropout: Option<Mask>) {
    check::<f64>(shape, dropout, 1e-12);
    check::<f32>(shape, dropout, 1e-5);
    check::<bf16>(shape, dropout, 2e-2);
    check_own::<f32>(shape, dropout, 1e-5);
    check_own::<bf16>(shape, dropout, 2e-2);
}

/// Several strips of queries, and heads whose queries, as words, end within one.
#[test]
fn own_products_over_several_strips() {
    let (queries, keys) = (4 * tile::ROWS + 55, tile::KEYS + 67);
    for causal in [true, false] {
        let (batch, kv_heads, dim) = (1, 1, 20);
        let shape = AttentionShape { batch, kv_heads, queries, keys, dim, causal, ..SMALL };
        check_own::<bf16>(shape, None, 2e-2);
    }
}

#[test]
fn small_causal_and_full() {
    for causal in [true, false] {
        check_all_types(AttentionShape { causal, ..SMALL }, None);
    }
}

#[test]
fn grouped_heads_of_odd_sizes() {
    let (group, dim) = (3, 13);
    for causal in [true, false] {
        check_all_types(AttentionShape { group, dim, causal, ..SMALL }, None);
    }
}

/// Several tiles of rows, the last one short, and several blocks of keys.
#[test]
fn more_than_one_tile() {
    let shape =
        AttentionShape { batch: 1, queries: 2 * tile::ROWS + 9, keys: 2 * tile::ROWS + 9, ..SMALL };
    check_all_types(shape, None);
    let keys = tile::KEYS + 70;
    for causal in [true, false] {
        let (kv_heads, queries) = (1, 70);
        check_all_types(AttentionShape { keys, kv_heads, queries, causal, ..shape }, None);
    }
}

/// More queries than keys: the first queries see nothing, and give and receive zeros.
#[test]
fn queries_that_see_nothing() {
    let (queries, keys) = (tile::ROWS + 10, 4);
    let shape = AttentionShape { queries, keys, ..SMALL };
    check_all_types(shape, None);
    let inputs = Inputs::random::<f32>(&shape);
    let computed = compute::<f32>(shape, None, &inputs, false);
    assert_eq!(computed.o[0], 0.0);
    assert_eq!(computed.lse[0], f32::NEG_INFINITY);
}

/// Rows of any length, so that most of them begin inside four words.
#[test]
fn dropout_in_both_passes() {
    for (group, keys) in [(1, 9), (2, 7), (3, 5), (1, 6), (2, 8)] {
        for causal in [true, false] {
            let shape = AttentionShape { group, keys, causal, ..SMALL };
            check_all_types(shape, Some(DROPOUT));
        }
    }
}

#[test]
fn dropout_over_several_tiles() {
    let shape = AttentionShape {
        batch: 1,
        kv_heads: 1,
        queries: tile::ROWS + 7,
        keys: tile::KEYS + 71,
        ..SMALL
    };
    check_all_types(shape, Some(DROPOUT));
}

/// Gradients of `Σ o∘d_o` by central differences of the naive forward pass.
#[test]
fn gradients_against_differences() {
    for (causal, dropout, group) in [(true, None, 2), (false, Some(DROPOUT), 1)] {
        let shape = AttentionShape { causal, group, dim: 3, keys: 6, ..SMALL };
        let mut inputs = Inputs::random::<f64>(&shape);
        let computed = compute::<f64>(shape, dropout, &inputs, false);
        let loss = |inputs: &Inputs| -> f64 {
            let o = naive(shape, dropout, inputs).o;
            o.iter().zip(&inputs.d_o).map(|(o, d)| o * d).sum()
        };
        type Field = fn(&mut Inputs) -> &mut Vec<f64>;
        let fields: [(Field, &[f64]); 3] = [
            (|x| &mut x.q, &computed.dq),
            (|x| &mut x.k, &computed.dk),
            (|x| &mut x.v, &computed.dv),
        ];
        for (which, (field, gradient)) in fields.into_iter().enumerate() {
            for (place, want) in gradient.iter().enumerate() {
                let start = field(&mut inputs)[place];
                let mut at = |x: f64| {
                    field(&mut inputs)[place] = x;
                    loss(&inputs)
                };
                let slope = (at(start + 1e-5) - at(start - 1e-5)) / 2e-5;
                at(start);
                let error = (slope - want).abs();
                assert!(error < 1e-7, "input {which}, {place}: {slope} {want}");
            }
        }
    }
}
