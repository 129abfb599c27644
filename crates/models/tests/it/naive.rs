//! The two models written out in f64 as plainly as possible, to see that loaded weights mean what
//! their names say: a wrong transpose of a square matrix or a swapped query and key changes logits.

use phalanx_models::hf::ModelSpec;

use crate::fixtures::{CASES, Loaded, case, error, load, numbers, read_raw};

#[test]
fn loaded_weights_reproduce_the_logits() {
    // A mixture's loop over tokens is that of the reference interpreter; `oracle.rs` has its logits. `t5.rs` has the other.
    for name in CASES.into_iter().filter(|name| *name != "mixtral" && !name.starts_with("t5")) {
        let loaded = load(&case(name)).unwrap();
        let (shape, ids) = numbers(&read_raw(&case(name).join("oracle.safetensors")), "ids");
        let oracle = read_raw(&case(name).join("oracle_f64.safetensors"));
        let (_, expected) = numbers(&oracle, "logits");
        let mut found = Vec::new();
        for sequence in ids.chunks(shape[2]).take(shape[1]) {
            let ids: Vec<usize> = sequence.iter().map(|&id| id as usize).collect();
            found.extend(logits(&loaded, &ids).into_iter().flatten());
        }
        let error = error(&found, &expected);
        assert!(error < 1e-12, "{name}: {error:e}");
    }
}

type Rows = Vec<Vec<f64>>;

struct Net<'a> {
    model: &'a Loaded,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: usize,
    eps: f64,
    gpt: bool,
}

fn logits(model: &Loaded, ids: &[usize]) -> Rows {
    let net = match &model.spec {
        ModelSpec::Gpt(s) => Net {
            model,
            heads: s.heads,
            kv_heads: s.heads,
            head_dim: s.width / s.heads,
            layers: s.layers,
            eps: s.norm_eps,
            gpt: true,
        },
        ModelSpec::Llama(s) => Net {
            model,
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            layers: s.layers,
            eps: s.norm_eps,
            gpt: false,
        },
        other @ (ModelSpec::Mixtral(_) | ModelSpec::T5(_)) => {
            panic!("{other:?} is not written out here")
        }
    };
    net.forward(ids)
}

impl Net<'_> {
    fn forward(&self, ids: &[usize]) -> Rows {
        let embed = self.matrix("embed");
        let mut x: Rows = ids.iter().map(|&id| embed[id].clone()).collect();
        if self.gpt {
            x = add(&x, &self.matrix("pos")[..x.len()]);
        }
        for i in 0..self.layers {
            let block = format!("blocks.{i}");
            let y = self.attention(&block, &self.norm(&format!("{block}.norm1"), &x));
            x = add(&x, &y);
            let y = self.mlp(&block, &self.norm(&format!("{block}.norm2"), &x));
            x = add(&x, &y);
        }
        let x = self.norm("norm", &x);
        if self.model.spec.tied() {
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(p, q)| p * q).sum();
            return x.iter().map(|row| embed.iter().map(|e| dot(row, e)).collect()).collect();
        }
        self.linear("head", &x)
    }

    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let gain = match self.gpt {
            true => self.vector(&format!("{name}.gain")),
            false => self.vector(name),
        };
        let bias = match self.gpt {
            true => self.vector(&format!("{name}.bias")),
            false => vec![0.0; gain.len()],
        };
        let one = |row: &Vec<f64>| -> Vec<f64> {
            let n = row.len() as f64;
            let mean = if self.gpt { row.iter().sum::<f64>() / n } else { 0.0 };
            let square = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (square + self.eps).sqrt();
            let terms = row.iter().zip(&gain).zip(&bias);
            terms.map(|((v, g), b)| (v - mean) * scale * g + b).collect()
        };
        x.iter().map(one).collect()
    }

    fn attention(&self, block: &str, x: &Rows) -> Rows {
        let (size, per_group) = (self.head_dim, self.heads / self.kv_heads);
        let [mut q, mut k, v] =
            ["q", "k", "v"].map(|n| self.linear(&format!("{block}.attn.{n}"), x));
        self.rotate(&mut q);
        self.rotate(&mut k);
        let mut out = vec![vec![0.0; self.heads * size]; x.len()];
        for t in 0..x.len() {
            for head in 0..self.heads {
                let (at, kv) = (head * size, head / per_group * size);
                let score = |s: usize| -> f64 {
                    let dot: f64 = (0..size).map(|j| q[t][at + j] * k[s][kv + j]).sum();
                    (dot / (size as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = (0..=t).map(score).collect();
                let total: f64 = weights.iter().sum();
                for j in 0..size {
                    let sum: f64 = weights.iter().zip(&v).map(|(w, v)| w * v[kv + j]).sum();
                    out[t][at + j] = sum / total;
                }
            }
        }
        self.linear(&format!("{block}.attn.out"), &out)
    }

    fn rotate(&self, x: &mut Rows) {
        let ModelSpec::Llama(spec) = &self.model.spec else {
            return;
        };
        let frequencies = spec.rope.rotary().frequencies(self.head_dim);
        for (t, row) in x.iter_mut().enumerate() {
            for head in row.chunks_mut(self.head_dim) {
                let half = head.len() / 2;
                for (j, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (t as f64 * frequency).sin_cos();
                    let (a, b) = (head[j], head[j + half]);
                    (head[j], head[j + half]) = (a * cos - b * sin, b * cos + a * sin);
                }
            }
        }
    }

    fn mlp(&self, block: &str, x: &Rows) -> Rows {
        let mut inner = self.linear(&format!("{block}.mlp.up"), x);
        if self.gpt {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let gelu = |v: f64| 0.5 * v * (1.0 + (root * (v + 0.044715 * v.powi(3))).tanh());
            inner.iter_mut().flatten().for_each(|v| *v = gelu(*v));
        } else {
            let gate = self.linear(&format!("{block}.mlp.gate"), x);
            let gates = gate.iter().flatten();
            for (v, g) in inner.iter_mut().flatten().zip(gates) {
                *v *= g / (1.0 + (-g).exp());
            }
        }
        self.linear(&format!("{block}.mlp.down"), &inner)
    }

    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let weight = self.matrix(name);
        let bias = match self.gpt && name != "head" {
            true => self.vector(&format!("{name}_bias")),
            false => vec![0.0; weight[0].len()],
        };
        let one = |row: &Vec<f64>| -> Vec<f64> {
            let entry = |j: usize| row.iter().zip(&weight).map(|(v, w)| v * w[j]).sum::<f64>();
            (0..bias.len()).map(|j| entry(j) + bias[j]).collect()
        };
        x.iter().map(one).collect()
    }

    fn matrix(&self, name: &str) -> Rows {
        let tensor = &self.model.tensors[name];
        let rows = tensor.to_f64();
        rows.chunks(tensor.shape[1]).map(<[f64]>::to_vec).collect()
    }

    fn vector(&self, name: &str) -> Vec<f64> {
        self.model.tensors[name].to_f64()
    }
}

fn add(x: &[Vec<f64>], y: &[Vec<f64>]) -> Rows {
    let rows = x.iter().zip(y);
    rows.map(|(a, b)| a.iter().zip(b).map(|(p, q)| p + q).collect()).collect()
}
