//! Norms, rotary, attention, dropout, losses and updates, against numbers computed once with
//! PyTorch 2 and transformers in double precision, and against the published random mask.

use phalanx_ir::DType;
use phalanx_ir::ops::{
    AdamW, Attention, AttentionKind, Decay, LayerNorm, Narrow, RmsNorm, RopeScaling, Rotary, Sgd,
};
use phalanx_ir::random::keeps;
use phalanx_reference::RefTensor;
use phalanx_testing::{ids, normal, tensor};

use crate::support::{assert_close, eval, wave};

const TIGHT: f64 = 1e-14;

#[test]
#[rustfmt::skip]
fn norms_as_in_pytorch() {
    let inputs = [
        ("x", wave(&[2, 3], 1.0, 0.0)),
        ("gain", tensor(&[3], &[1.0, 2.0, -1.0])),
        ("bias", tensor(&[3], &[0.5, 0.0, -0.5])),
    ];
    let got = eval(&inputs, |b, v| {
        let layer = b.apply_all(LayerNorm { eps: 1e-5 }, v);
        let rms = b.apply_all(RmsNorm { eps: 1e-5 }, &v[..2]);
        [layer, rms].concat()
    });
    assert_close(&got[0], &[-0.7531948833772333, 0.11841849489397371, -1.6939856359302463, -0.8260993262810954, 2.156653461239846, -0.7477725956611753], 1e-13);
    assert_close(&got[3], &[0.0, 1.637151983235124, -1.526361562883258, 0.9409944636561274, 2.0924857346633545, -1.0098872070610507], 1e-13);
    // The statistics: the first row is 0, sin 0.37, sin 0.74.
    let row = [0.0, 0.37f64.sin(), 0.74f64.sin()];
    let mean = row.iter().sum::<f64>() / 3.0;
    let square = row.iter().map(|x| x * x).sum::<f64>() / 3.0;
    assert!((got[1].values()[0] - mean).abs() < TIGHT);
    assert!((got[2].values()[0] - (square - mean * mean + 1e-5).powf(-0.5)).abs() < 1e-12);
    assert!((got[4].values()[0] - (square + 1e-5).powf(-0.5)).abs() < 1e-12);
}

/// Their frequencies are in single precision, hence the tolerance.
#[test]
#[rustfmt::skip]
fn rotary_as_in_transformers() {
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
    let cases: [(RopeScaling, [f64; 16]); 3] = [
        (RopeScaling::None, [0.9080232911306235, 0.1314955458017182, -0.4380731014288132, -0.779106781701928, -0.36841537753072995, -1.0041367391594436, -0.941083524437023, -0.6942203494617809, -0.66935529284694, -0.5835471965046656, 0.17002745081394707, 0.6278624128515742, -0.6970256791200073, 0.8077640231439043, 1.013353696982774, 0.8337772204461266]),
        (RopeScaling::Linear { factor: 4.0 }, [0.4132643779085965, -0.10811098776066232, -0.5073566954413794, -0.7953510239684106, -0.888509290644765, -1.0069228145078766, -0.9056132446821799, -0.6755487165003727, -0.7426279477692365, -0.15017132189683657, 0.3195519021851441, 0.6666908932405464, 0.6183729092602586, 0.9851185826973211, 0.9765662343329604, 0.8030684260907761]),
        (llama3, [0.9080232911306235, 0.059078005608184825, -0.5181492655362773, -0.7980151342770806, -0.36841537753072995, -1.010985371671338, -0.8994818173545283, -0.6723995370600451, -0.66935529284694, -0.4618679612439071, 0.3428133566567716, 0.6730188132374663, -0.6970256791200073, 0.8829994664837334, 0.9686454715363284, 0.7977727396473354]),
    ];
    for (scaling, expected) in cases {
        let x = wave(&[1, 3, 1, 8], 1.0, 0.0);
        let rotary = Rotary { theta: 100.0, scaling, inverse: false };
        let back = Rotary { inverse: true, ..rotary };
        let got = eval(&[("x", x.clone())], |_, v| {
            let y = v[0].rotary(rotary);
            vec![y.slice(1, 1, 2), y.slice(1, 0, 1), y.rotary(back)]
        });
        assert_close(&got[0], &expected, 1e-7);
        assert_eq!(got[1].values(), x.values()[..8], "position 0 does not turn");
        assert_close(&got[2], &x.values(), TIGHT);
    }
}

/// Two queries, three keys, four query heads on two key heads: the mask lets the first query see
/// two keys and the second all three.
#[test]
#[rustfmt::skip]
fn attention_as_in_pytorch() {
    let o = [0.8049525025106856, 0.9457745760056061, 1.0295554814457362, 1.0810170316218328, 0.9778307336964986, 0.982958913048018, 0.9822726782480931, 0.9694579241489328, 0.6459239482680774, 0.6148660189803304, 0.46629251171593594, 0.4016089000891368, -0.15109136164454115, -0.40044241434046685, -0.061935728081509135, -0.2938072425699131];
    let lse = [0.9534432356322158, 1.100251888497684, 1.8703902352706783, 0.7165802342210673, 2.2015253010564124, 1.4930374003584124, 1.7104007689834995, 1.25825379888321];
    let inputs = [
        ("q", wave(&[1, 2, 4, 2], 1.0, 0.0)),
        ("k", wave(&[1, 3, 2, 2], 1.5, 0.0)),
        ("v", wave(&[1, 3, 2, 2], 1.0, 0.25)),
    ];
    let of = |kind| {
        let op = Attention { kind, causal: true, dropout: 0.0, site: 0 };
        eval(&inputs, |b, v| b.apply_all(op, v)[..2].to_vec())
    };
    let (flash, stored) = (of(AttentionKind::Flash), of(AttentionKind::Materialised));
    assert_close(&flash[0], &o, 1e-13);
    assert_close(&flash[1], &lse, 1e-13);
    assert_close(&stored[0], &o, 1e-13);
    let probabilities = stored[1].values();
    for (row, p) in probabilities.chunks(3).enumerate() {
        assert!((p.iter().sum::<f64>() - 1.0).abs() < TIGHT);
        assert_eq!(p[2] == 0.0, row % 2 == 0, "only the second query sees the third key");
    }
}

#[test]
fn a_query_that_sees_no_key_gives_zeros() {
    let inputs = [
        ("q", normal("q", &[1, 2, 1, 2])),
        ("k", normal("k", &[1, 1, 1, 2])),
        ("v", tensor(&[1, 1, 1, 2], &[3.0, 4.0])),
    ];
    let kind = AttentionKind::Flash;
    let op = Attention { kind, causal: true, dropout: 0.0, site: 0 };
    let got = eval(&inputs, |b, v| b.apply_all(op, v));
    assert_eq!(got[0].values(), [0.0, 0.0, 3.0, 4.0]);
    assert_eq!(got[1].values()[0], f64::NEG_INFINITY);
}

/// With equal scores and values of one, o is the number of kept keys over t·(1−p).
#[test]
fn attention_dropout_follows_the_published_mask() {
    let (b, s, h, t, p) = (2, 3, 2, 5, 0.4);
    let key = [9, 8, 7, 6, 5];
    let inputs = [
        ("q", tensor(&[b, s, h, 1], &[0.0; 12])),
        ("k", tensor(&[b, t, h, 1], &[1.0; 20])),
        ("v", tensor(&[b, t, h, 1], &[1.0; 20])),
        ("key", ids(&[5], &key)),
    ];
    for kind in [AttentionKind::Flash, AttentionKind::Materialised] {
        let op = Attention { kind, causal: false, dropout: p, site: 4 };
        let o = eval(&inputs, |f, v| vec![f.apply(op, v)]).remove(0).values();
        for (n, o) in o.iter().enumerate() {
            let (row, i, head) = (n / (s * h), n / h % s, n % h);
            let kept = (0..t)
                .filter(|j| keeps(key, 4, row as u64, ((head * s + i) * t + j) as u64, p))
                .count();
            assert!((o - kept as f64 / (t as f64 * (1.0 - p))).abs() < TIGHT);
        }
    }
}

#[test]
fn dropout_follows_the_published_mask() {
    let (key, p) = ([1, 2, 3, 4, 100], 0.25);
    let x = tensor(&[3, 2, 4], &[1.5; 24]);
    let y = eval(&[("x", x), ("key", ids(&[5], &key))], |_, v| vec![v[0].dropout(p)]);
    let y = y[0].values();
    for (n, y) in y.iter().enumerate() {
        // The builder's first random op has site 1.
        let kept = keeps(key, 1, n as u64 / 8, n as u64 % 8, p);
        assert_eq!(*y, if kept { 2.0 } else { 0.0 });
    }
    assert!(y.contains(&0.0) && y.contains(&2.0));
}

#[test]
#[rustfmt::skip]
fn softmax_and_cross_entropy_as_in_pytorch() {
    let inputs = [("x", wave(&[3, 4], 2.0, 0.0)), ("targets", ids(&[3], &[1, -1, 3]))];
    let got = eval(&inputs, |b, v| {
        let mut all = b.apply_all(phalanx_ir::ops::CrossEntropy, v);
        all.push(v[0].softmax());
        all
    });
    assert_close(&got[0], &[1.8348368020010533, 0.0, 2.583714666203215], TIGHT);
    assert_close(&got[1], &[2.5580676659309773, 3.0882262422152613, 0.98238110185158], TIGHT);
    assert_close(&got[2], &[0.07745426344462457, 0.15963955249786713, 0.29834884906916775, 0.4645573349883405, 0.33405001452137745, 0.31171192460589425, 0.22422723536285633, 0.13001082550987206, 0.5373054349159836, 0.2574395280615991, 0.12976198598505131, 0.07549305103736592], TIGHT);
    let huge = tensor(&[2], &[1e4, 1e4]);
    let got = eval(&[("x", huge)], |_, v| vec![v[0].softmax()]);
    assert_close(&got[0], &[0.5, 0.5], 1e-11);
}

/// Three steps with gradients (0.1, −0.2, 0.3)·step, clipped by half.
fn descend(states: usize, op: impl Into<phalanx_ir::Op>) -> Vec<RefTensor> {
    let op = op.into();
    let mut state = vec![tensor(&[3], &[0.5, -1.25, 2.0])];
    state.resize(1 + states, tensor(&[3], &[0.0; 3]));
    for step in 1..=3 {
        let at = f64::from(step);
        let scalar = |value| RefTensor::scalar(DType::F64, value);
        let gradient = tensor(&[3], &[0.1 * at, -0.2 * at, 0.3 * at]);
        let mut inputs = vec![("w", state[0].clone()), ("g", gradient)];
        for (i, buffer) in state[1..].iter().enumerate() {
            inputs.push((["m", "v"][i], buffer.clone()));
        }
        inputs.extend([("lr", scalar(0.1)), ("step", scalar(at)), ("clip", scalar(0.5))]);
        state = eval(&inputs, |b, v| b.apply_all(op.clone(), v));
    }
    state
}

#[test]
#[rustfmt::skip]
fn updates_as_in_pytorch() {
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: Decay::all(0.1), coupled: false, narrow: Narrow::None };
    let got = descend(2, adamw);
    assert_close(&got[0], &[0.19784795401869154, -0.9255721839556388, 1.653296427267954], 1e-13);
    assert_close(&got[1], &[0.02805, -0.0561, 0.08414999999999997], TIGHT);
    assert_close(&got[2], &[0.0017128125000000019, 0.0068512500000000075, 0.01541531250000001], TIGHT);
    let sgd = Sgd { momentum: 0.9, nesterov: false, decay: Decay::all(0.01), narrow: Narrow::None };
    let got = descend(1, sgd);
    assert_close(&got[0], &[0.44967639449999997, -1.1479514887500002, 1.8462265830000002], TIGHT);
    assert_close(&got[1], &[0.293791055, -0.5943476125, 0.89490417], TIGHT);
    let got = descend(1, Sgd { nesterov: true, ..sgd });
    assert_close(&got[0], &[0.42327500627549997, -1.09454123783625, 1.765807469397], TIGHT);
    let got = descend(1, Sgd { momentum: 0.0, decay: Decay::all(0.0), ..sgd });
    assert_close(&got[0], &[0.47, -1.19, 1.91], TIGHT);
}

#[test]
fn a_master_gives_its_narrow_copy() {
    let single = |values: &[f32]| RefTensor::from_f32(&[values.len()], values).unwrap();
    let scalar = |value| RefTensor::scalar(DType::F32, value);
    let inputs = [
        ("w", single(&[1.0, 2.0])),
        ("g", single(&[0.3, -0.7])),
        ("m", single(&[0.0, 0.0])),
        ("lr", scalar(0.1)),
        ("step", scalar(1.0)),
        ("clip", scalar(1.0)),
    ];
    let op = Sgd {
        momentum: 0.9,
        nesterov: false,
        decay: Decay::all(0.0),
        narrow: Narrow::Copy(DType::Bf16),
    };
    let got = eval(&inputs, |b, v| b.apply_all(op, v));
    assert_close(&got[0], &[0.97, 2.07], 1e-7);
    assert_eq!(got[2].dtype(), DType::Bf16);
    // Below 1 its numbers are multiples of 2⁻⁸, and 0.97·256 = 248.32; above 2 of 2⁻⁶, and
    // 2.07·64 = 132.48.
    assert_eq!(got[2].values(), [248.0 / 256.0, 132.0 / 64.0]);
}

/// By hand: 1 + 2⁻⁸ is a tie, which goes away from zero; a step of 2⁻⁹ makes it 1 + 2⁻⁹, which is rounded down.
#[test]
fn a_master_in_halves_gives_its_halves() {
    let of = |dtype, value| RefTensor::new(dtype, &[1], &[value]).unwrap();
    let scalar = |value| RefTensor::scalar(DType::F32, value);
    let op = Sgd { momentum: 0.0, nesterov: false, decay: Decay::all(0.0), narrow: Narrow::Split };
    let step = |[upper, lower]: [RefTensor; 2], lr| {
        let inputs = [
            ("w", upper),
            ("g", of(DType::Bf16, 1.0)),
            ("low", lower),
            ("m", of(DType::F32, 0.0)),
            ("lr", scalar(lr)),
            ("step", scalar(1.0)),
            ("clip", scalar(1.0)),
        ];
        let got = eval(&inputs, |b, v| b.apply_all(op, v));
        assert_eq!(got[2].values(), [1.0]);
        [got[0].clone(), got[1].clone()]
    };
    let [upper, lower] = step([of(DType::Bf16, 1.0), of(DType::U16, 0.0)], -(2f64.powi(-8)));
    assert_eq!((upper.values()[0], lower.values()[0]), (1.0 + 2f64.powi(-7), 32768.0));
    let [upper, lower] = step([upper, lower], 2f64.powi(-9));
    assert_eq!((upper.values()[0], lower.values()[0]), (1.0, 16384.0));
}

/// By hand: four tokens, three experts with two places each. First choices come first; the third
/// token's finds expert 0 full, and so does the fourth's second.
#[test]
fn places_go_by_choice_and_then_by_token() {
    let index = ids(&[1, 4, 2], &[0, 1, 0, 1, 0, 2, 1, 0]);
    let rows = tensor(&[1, 4, 1], &[1.0, 2.0, 3.0, 4.0]);
    let got = eval(&[("index", index), ("x", rows)], |_, v| {
        let slot = v[0].assign(3, 2, None);
        let at = v[1].dispatch(slot, 3, 2);
        let load = v[0].histogram(3, 1, DType::F64);
        vec![slot, load, slot.histogram(3, 2, DType::F64), at]
    });
    assert_eq!(got[0].values(), [0.0, 3.0, 1.0, 6.0, 6.0, 4.0, 2.0, 6.0]);
    assert_eq!(got[1].values(), [4.0, 3.0, 1.0]);
    assert_eq!(got[2].values(), [2.0, 2.0, 1.0]);
    assert_eq!(got[3].values(), [1.0, 2.0, 4.0, 1.0, 3.0, 0.0]);
}
