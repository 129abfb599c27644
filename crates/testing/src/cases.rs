//! Random programs, meshes and annotations: the cases on which partitioning is tried.
//!
//! A case is a pure function of its seed. Programs are small and use every family of ops; sizes are
//! often uneven; annotations are on any value. The choices of a case are made either by the
//! partitioner, or at random among the legal ones of every instruction, which finds far more.

use std::collections::BTreeMap;

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Mesh, Program, Role, Tensor as Value, ValueId};
use phalanx_reference::Tensor;
use phalanx_spmd::{Annotations, Annotator, SpmdError};

/// A source of choices.
#[derive(Debug)]
pub struct Dice {
    stream: Stream,
    at: u64,
}

impl Dice {
    /// The dice of a seed.
    pub fn new(seed: u64) -> Self {
        Self { stream: Stream::named(seed, "dice"), at: 0 }
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.at += 1;
        self.stream.below(self.at, n as u64) as usize
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// True this often of a hundred times.
    pub fn percent(&mut self, p: usize) -> bool {
        self.below(100) < p
    }
}

/// A program with a mesh and annotations.
#[derive(Debug)]
pub struct Case {
    /// The forward program.
    pub forward: Program,
    /// The mesh.
    pub mesh: Mesh,
    /// What is asked of its values.
    pub annotations: Annotations,
}

/// The case of a seed; some seeds ask for what can't be, and are refused.
pub fn case(seed: u64) -> Result<Case, SpmdError> {
    let mut dice = Dice::new(seed);
    let forward = program(&mut dice);
    let mesh = mesh(&mut dice);
    let annotations = annotations(&mut dice, &forward, &mesh)?;
    Ok(Case { forward, mesh, annotations })
}

/// Numbers for every input of a joint program.
pub fn numbers(joint: &Program, seed: u64) -> BTreeMap<String, Tensor> {
    let number = |name: &str, value: ValueId| {
        let (ty, stream) = (joint.ty(value), Stream::named(seed, name));
        match (ty.dtype, ty.shape.as_slice()) {
            (DType::I32, [5]) => Tensor::from_i32(&[5], &[seed as i32, 2, 3, 4, 5]).unwrap(),
            (DType::I32, shape) => Tensor::ids(shape, IDS as u32, stream),
            (dtype, shape) => {
                // Products keep the size of their operands, so that nothing is ill-conditioned.
                let inner = if shape.len() > 1 { shape[0] as f64 } else { 1.0 };
                let values = Tensor::normal(dtype, shape, stream).values();
                let small: Vec<f64> = values.iter().map(|x| 0.7 * x / inner.sqrt()).collect();
                Tensor::new(dtype, shape, &small).unwrap()
            }
        }
    };
    joint.inputs().iter().map(|p| (p.name.clone(), number(&p.name, p.value))).collect()
}

/// Ids lie below this in every case; vocabularies are not smaller.
const IDS: usize = 5;

fn mesh(dice: &mut Dice) -> Mesh {
    let sizes: &[usize] =
        dice.pick(&[&[2][..], &[4], &[3], &[2, 2], &[2, 3], &[4, 2], &[2, 2, 2], &[2, 4], &[3, 2]]);
    let mesh = Mesh::new(["a", "b", "c"].into_iter().zip(sizes.iter().copied())).unwrap();
    match dice.percent(25).then(|| mesh.axes().find(|&(_, n)| n == 4)).flatten() {
        Some((axis, _)) => mesh.split(axis.name(), &[2, 2]).unwrap(),
        None => mesh,
    }
}

fn annotations(dice: &mut Dice, program: &Program, mesh: &Mesh) -> Result<Annotations, SpmdError> {
    let mut annotator = Annotator::new(program, mesh)?;
    let inputs = program.inputs().iter().map(|p| (p.value, p.role));
    let results = program.instrs().iter().flat_map(|i| &i.outputs).map(|&v| (v, Role::Probe));
    let all: Vec<(ValueId, Role)> = inputs.chain(results).collect();
    for (value, role) in all {
        let chance = match role {
            Role::Scalar => 0,
            Role::Probe => 15,
            _ => 75,
        };
        if !dice.percent(chance) {
            continue;
        }
        let uneven = dice.percent(15);
        for (axis, _) in mesh.axes().collect::<Vec<_>>() {
            let shape = &program.ty(value).shape;
            if shape.is_empty() || !dice.percent(70) {
                if dice.percent(50) {
                    annotator.replicate(value, axis.name())?;
                }
                continue;
            }
            let dim = dice.below(shape.len());
            let shards: usize = annotator.shards(value, dim) * annotator.degree(axis.name());
            if shape[dim].is_multiple_of(shards) || (uneven && shape[dim] > 1) {
                match role == Role::Param && dice.percent(20) {
                    true => annotator.store(value, dim, axis.name())?,
                    false => annotator.shard(value, dim, axis.name())?,
                }
            }
        }
    }
    Ok(annotator.finish())
}

fn program(dice: &mut Dice) -> Program {
    let b = Builder::new("case", DType::F64);
    let (batch, seq) = (dice.pick(&[2, 4, 4, 6, 3]), dice.pick(&[2, 4, 4, 8, 5]));
    let width = dice.pick(&[4, 8, 8, 6]);
    let first = match dice.percent(40) {
        true => {
            let ids = b.data("ids", DType::I32, [batch, seq]);
            b.param("embed", [dice.pick(&[5, 7, 8, 6]), width]).embedding(ids)
        }
        false => b.boundary("x", [batch, seq, width]),
    };
    let mut pool = vec![first];
    let steps = 2 + dice.below(6);
    let mut maker = Maker { b: &b, dice, params: 0 };
    for _ in 0..steps {
        let from = pool.len().saturating_sub(2);
        let x = pool[from + maker.dice.below(pool.len() - from)];
        let made = maker.step(x, &pool);
        pool.extend(made);
    }
    let last = pool[pool.len() - 1];
    if last.shape().len() == 3 && last.shape()[2] >= IDS && maker.dice.percent(35) {
        let shape = last.shape();
        let targets = b.data("targets", DType::I32, [shape[0], shape[1]]);
        b.loss("loss", last.cross_entropy(targets).sum_all() * b.scalar("inv"));
    } else {
        b.output("y", last);
    }
    b.finish().unwrap()
}

struct Maker<'b, 'd> {
    b: &'b Builder,
    dice: &'d mut Dice,
    params: usize,
}

impl<'b> Maker<'b, '_> {
    fn param(&mut self, shape: &[usize]) -> Value<'b> {
        self.params += 1;
        let ty = phalanx_ir::TensorType::new(DType::F64, shape);
        self.b.input(&format!("w{}", self.params), Role::Param, ty)
    }

    fn step(&mut self, x: Value<'b>, pool: &[Value<'b>]) -> Option<Value<'b>> {
        let shape = x.shape();
        let (rank, last) = (shape.len(), shape.last().copied().unwrap_or(1));
        let alike: Vec<Value<'b>> = pool.iter().copied().filter(|y| y.shape() == shape).collect();
        Some(match self.dice.below(19) {
            0..=3 if rank > 0 => {
                let to = self.dice.pick(&[2, 3, 4, 4, 5, 6, 8]);
                let w = self.param(&[last, to]);
                x.matmul(w)
            }
            4 => match self.dice.below(4) {
                0 => x.gelu(),
                1 => x.silu(),
                2 => x.tanh(),
                _ => x.scale(0.5),
            },
            5 => x + self.dice.pick(&alike),
            6 => x * self.dice.pick(&alike),
            7 if rank > 0 => {
                let gain = self.param(&[last]);
                x.rms_norm(gain, 1e-5)
            }
            8 if rank > 0 => {
                let (gain, bias) = (self.param(&[last]), self.param(&[last]));
                x.layer_norm(gain, bias, 1e-5)
            }
            9 if rank > 0 => x.softmax(),
            10 => self.transposed(x),
            11 => self.reshaped(x)?,
            12 if rank == 3 => self.attention(x),
            13 if rank > 2 => x.sum(&[self.dice.below(rank)]),
            14 if rank > 0 => x + self.param(&[last]),
            15 if rank == 3 => {
                let same = |y: &&Value<'b>| {
                    let s = y.shape();
                    s.len() == 3 && s[0] == shape[0] && s[2] == shape[2]
                };
                let others: Vec<Value<'b>> = pool.iter().filter(same).copied().collect();
                x.einsum(self.dice.pick(&others), "abc,adc->abd").scale(1.0 / last as f64)
            }
            16 => x.dropout(0.3),
            17 if rank > 0 && last > 2 => x.slice(rank - 1, 1, last - 1),
            18 => x.max(x.scale(0.3)),
            _ => return None,
        })
    }

    fn transposed(&mut self, x: Value<'b>) -> Value<'b> {
        let mut perm: Vec<usize> = (0..x.shape().len()).collect();
        for i in (1..perm.len()).rev() {
            perm.swap(i, self.dice.below(i + 1));
        }
        self.b.apply(phalanx_ir::ops::Transpose { perm }, &[x])
    }

    fn reshaped(&mut self, x: Value<'b>) -> Option<Value<'b>> {
        let mut shape = x.shape();
        if shape.len() > 1 && self.dice.percent(50) {
            let i = self.dice.below(shape.len() - 1);
            let minor = shape.remove(i + 1);
            shape[i] *= minor;
        } else {
            let i = self.dice.below(shape.len().max(1));
            let size = *shape.get(i)?;
            let parts: Vec<usize> =
                [2, 3, 4].into_iter().filter(|&f| size > f && size.is_multiple_of(f)).collect();
            if parts.is_empty() || shape.len() > 3 {
                return None;
            }
            let part = self.dice.pick(&parts);
            let pair =
                if self.dice.percent(50) { [part, size / part] } else { [size / part, part] };
            shape.splice(i..=i, pair);
        }
        Some(self.b.apply(phalanx_ir::ops::Reshape { shape }, &[x]))
    }

    fn attention(&mut self, x: Value<'b>) -> Value<'b> {
        let shape = x.shape();
        let (heads, kv, size) =
            self.dice.pick(&[(4, 4, 2), (4, 2, 2), (2, 1, 2), (2, 2, 4), (3, 3, 2)]);
        let kind = self.dice.pick(&[AttentionKind::Flash, AttentionKind::Materialised]);
        let dropout = if self.dice.percent(20) { 0.3 } else { 0.0 };
        let mut project = |n: usize| {
            let w = self.param(&[shape[2], n * size]);
            x.matmul(w).reshape([shape[0], shape[1], n, size])
        };
        let (q, k, v) = (project(heads), project(kv), project(kv));
        let o = q.attention(k, v, kind, dropout);
        o.reshape([shape[0], shape[1], heads * size])
    }
}
