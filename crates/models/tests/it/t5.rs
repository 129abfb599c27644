//! T5 written out in f64 as plainly as possible, from the paper's formulas: logits, loss, and gradients as slopes
//! of the loss.

use std::collections::BTreeMap;

use phalanx_cpu::CpuEngine;
use phalanx_engine::Engine;
use phalanx_ir::{DType, Param};
use phalanx_models::hf::T5Spec;
use phalanx_models::{Architecture, BatchShape, T5, port};
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_testing::{Rig, RigBatch, Setup, optimise, worst};

const SHAPE: BatchShape = BatchShape { batch: 2, seq: 9 };
const VOCAB: usize = 11;

/// Few kinds of distances, so that most are shared, and some are as far as can be.
fn net(tied: bool) -> T5 {
    T5::new(T5Spec { buckets: 4, far: 5, tied, scaled: tied, ..T5Spec::new(2, 8, 2, 12, VOCAB) })
}

type Rows = Vec<Vec<f64>>;
type Params = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// Numbers that look random, between −½ and ½; gains are near one.
fn numbers(param: &Param) -> Vec<f64> {
    let seed = param.name.bytes().fold(7_usize, |all, byte| (31 * all + byte as usize) % 10_007);
    let one = |i: usize| ((7919 * i + 104_729 * seed) % 2003) as f64 / 2003.0 - 0.5;
    let gain = if param.shape.len() == 1 { 1.0 } else { 0.0 };
    (0..param.elements()).map(|i| one(i) + gain).collect()
}

fn tokens(phase: usize) -> Vec<i32> {
    let one = |i: usize| ((5 * i * i + 3 * i + phase) % VOCAB) as i32;
    (0..SHAPE.batch * SHAPE.seq).map(one).collect()
}

struct Net<'a> {
    sizes: &'a T5Spec,
    params: &'a Params,
}

impl Net<'_> {
    /// The logits of each sample's continuation.
    fn logits(&self, ids: &[i32]) -> Rows {
        let source = SHAPE.seq / 2;
        let words = |ids: &[i32]| -> Rows {
            ids.iter().map(|&id| self.matrix("embed")[id as usize].clone()).collect()
        };
        ids.chunks(SHAPE.seq)
            .flat_map(|ids| self.decoded(words(&ids[..source]), words(&ids[source..])))
            .collect()
    }

    fn decoded(&self, mut source: Rows, mut h: Rows) -> Rows {
        for layer in 0..self.sizes.layers {
            let at = |name: &str| format!("encoder.blocks.{layer}.{name}");
            let x = self.norm(&at("norm1"), &source);
            source = add(&source, &self.attention(&at("attn"), &x, &x, Some("encoder.bias")));
            let x = self.norm(&at("norm2"), &source);
            source = add(&source, &self.inner(&at("mlp"), &x));
        }
        let memory = self.norm("encoder.norm", &source);
        for layer in 0..self.sizes.layers {
            let at = |name: &str| format!("decoder.blocks.{layer}.{name}");
            let x = self.norm(&at("norm1"), &h);
            h = add(&h, &self.attention(&at("attn"), &x, &x, Some("decoder.bias")));
            let x = self.norm(&at("norm2"), &h);
            h = add(&h, &self.attention(&at("cross"), &x, &memory, None));
            let x = self.norm(&at("norm3"), &h);
            h = add(&h, &self.inner(&at("mlp"), &x));
        }
        let x = self.norm("norm", &h);
        if !self.sizes.tied {
            return times(&x, &self.matrix("head"));
        }
        let root = (self.sizes.width as f64).sqrt();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a / root * b).sum();
        x.iter()
            .map(|row| self.matrix("embed").iter().map(|word| dot(row, word)).collect())
            .collect()
    }

    /// Scores of head `n` get `bias[kind of the distance][n]`; a decoder's queries see no later keys.
    fn attention(&self, name: &str, queries: &Rows, keys: &Rows, bias: Option<&str>) -> Rows {
        let part = |part: &str, x: &Rows| times(x, &self.matrix(&format!("{name}.{part}")));
        let (q, k, v) = (part("q", queries), part("k", keys), part("v", keys));
        let size = self.sizes.width / self.sizes.heads;
        let mut out = vec![vec![0.0; self.sizes.width]; q.len()];
        for head in 0..self.sizes.heads {
            let own = head * size..(head + 1) * size;
            for (at, out) in out.iter_mut().enumerate() {
                let score = |key: usize| -> f64 {
                    let dot: f64 = own.clone().map(|i| q[at][i] * k[key][i]).sum();
                    let Some(table) = bias else { return dot };
                    let both = table == "encoder.bias";
                    match kind(key as i64 - at as i64, both, self.sizes) {
                        Some(kind) => dot + self.matrix(table)[kind][head],
                        None => f64::NEG_INFINITY,
                    }
                };
                let shares: Vec<f64> = (0..k.len()).map(|key| score(key).exp()).collect();
                let all: f64 = shares.iter().sum();
                for i in own.clone() {
                    out[i] = shares.iter().zip(&v).map(|(share, v)| share / all * v[i]).sum();
                }
            }
        }
        part("out", &out)
    }

    fn inner(&self, name: &str, x: &Rows) -> Rows {
        let mut inner = times(x, &self.matrix(&format!("{name}.up")));
        inner.iter_mut().flatten().for_each(|v| *v = v.max(0.0));
        times(&inner, &self.matrix(&format!("{name}.down")))
    }

    /// No mean is taken off, and no bias added.
    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let gain = &self.params[name].1;
        let one = |row: &Vec<f64>| -> Vec<f64> {
            let square = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
            let root = (square + self.sizes.norm_eps).sqrt();
            row.iter().zip(gain).map(|(v, gain)| v / root * gain).collect()
        };
        x.iter().map(one).collect()
    }

    fn matrix(&self, name: &str) -> Rows {
        let (shape, values) = &self.params[name];
        values.chunks(shape[1]).map(<[f64]>::to_vec).collect()
    }

    /// The mean cross-entropy of the tokens that follow.
    fn loss(&self, ids: &[i32], targets: &[i32]) -> f64 {
        let source = SHAPE.seq / 2;
        let wanted = targets.chunks(SHAPE.seq).flat_map(|row| &row[source..]);
        let terms: Vec<f64> = (self.logits(ids).iter().zip(wanted))
            .map(|(row, &target)| {
                row.iter().map(|v| v.exp()).sum::<f64>().ln() - row[target as usize]
            })
            .collect();
        terms.iter().sum::<f64>() / terms.len() as f64
    }
}

/// The paper's kinds: half of them for keys behind the query; near distances one by one, then by logarithm.
fn kind(distance: i64, both: bool, T5Spec { buckets, far, .. }: &T5Spec) -> Option<usize> {
    if !both && distance > 0 {
        return None;
    }
    let (kinds, first) = match both {
        true => (buckets / 2, if distance > 0 { buckets / 2 } else { 0 }),
        false => (*buckets, 0),
    };
    let (near, steps) = (kinds / 2, distance.unsigned_abs() as usize);
    let beyond = (steps as f64 / near as f64).ln() / (*far as f64 / near as f64).ln();
    let beyond = near + (beyond * (kinds - near) as f64) as usize;
    Some(first + if steps < near { steps } else { beyond.min(kinds - 1) })
}

fn times(x: &Rows, w: &Rows) -> Rows {
    let row = |row: &Vec<f64>| -> Vec<f64> {
        (0..w[0].len()).map(|j| row.iter().zip(w).map(|(v, w)| v * w[j]).sum()).collect()
    };
    x.iter().map(row).collect()
}

fn add(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

#[test]
fn it_is_what_the_paper_says_on_every_engine() {
    for tied in [true, false] {
        compare(&net(tied), ReferenceEngine::new());
        compare(&net(tied), CpuEngine::new(2).unwrap());
    }
}

fn compare<E: Engine>(net: &T5, engine: E) {
    let sizes = &net.spec;
    let model = net.model(SHAPE, DType::F64).unwrap();
    let logits = net.logits(SHAPE, DType::F64).unwrap();
    let setup = Setup { compile: optimise, clip: None, ..Setup::new(DType::F64) };
    let mut rig = Rig::with_forward(engine, &model, &logits, &setup);
    rig.set_params(numbers);
    let mut params: Params = (model.params().iter())
        .map(|param| (param.name.clone(), (param.shape.clone(), numbers(param))))
        .collect();
    let (ids, mut targets) = (tokens(1), tokens(4));
    // What the encoder reads is not predicted.
    let source = SHAPE.seq / 2;
    targets.chunks_mut(SHAPE.seq).for_each(|row| row[..source].fill(-1));
    let whole = |values: &[i32]| RefTensor::from_i32(&[SHAPE.batch, SHAPE.seq], values).unwrap();
    let data =
        vec![(port::IDS.to_owned(), whole(&ids)), (port::TARGETS.to_owned(), whole(&targets))];
    let batch = RigBatch { data, first: 0 };
    let found = rig.probe(&batch, "head", port::LOGITS);
    let expected: Vec<f64> =
        Net { sizes, params: &params }.logits(&ids).into_iter().flatten().collect();
    assert!(worst(&found, &expected) < 1e-12, "logits: {:e}", worst(&found, &expected));
    let count = (SHAPE.batch * (SHAPE.seq - source)) as f64;
    let (loss, _) = rig.step(&[batch], 0.0, 1.0 / count);
    let expected = Net { sizes, params: &params }.loss(&ids, &targets);
    assert!((loss - expected).abs() < 1e-12, "{loss}, {expected}");
    for param in model.params() {
        let found = rig.gradient(&param.name);
        // A few elements of each, among them the first, which for tables of distances is no distance at all.
        let step = param.elements().div_ceil(7);
        let mut slope = |at: usize| {
            let mut moved = |by: f64| {
                params.get_mut(&param.name).unwrap().1[at] += by;
                let loss = Net { sizes, params: &params }.loss(&ids, &targets);
                params.get_mut(&param.name).unwrap().1[at] -= by;
                loss
            };
            (moved(1e-5) - moved(-1e-5)) / 2e-5
        };
        for at in (0..param.elements()).step_by(step) {
            let expected = slope(at);
            let error = (found[at] - expected).abs();
            assert!(error < 1e-8, "{}[{at}]: {}, not {expected}", param.name, found[at]);
        }
    }
}
