//! One instance of every op, with operands that fit it, in double precision and uneven sizes.

mod factors;
mod routing;
mod split;
mod windows;

pub use split::SplitPair;

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_comm::Communicator;
use phalanx_engine::Engine;
use phalanx_ir::ops::{
    AdamW, Attend, AttendGrad, Attention, AttentionGrad, AttentionKind, Binary, BinaryKind, Bounds,
    Broadcast, Cast, Compare, CompareKind, Concat, CrossEntropy, CrossEntropyGrad, Decay, Dropout,
    Embedding, EmbeddingGrad, Fill, Fused, FusedArg, FusedStep, KeyForm, KeyProduct, LambDirection,
    LayerNorm, LayerNormGrad, LinearCrossEntropy, Lion, Matmul, MemberScale, MemberSquares, Narrow,
    Noise, NoiseKind, PackedMatmul, Pad, Reduce, ReduceKind, Reshape, RmsNorm, RmsNormGrad,
    RopeScaling, Rotary, Scale, Select, Sgd, Shift, Slice, Softmax, SoftmaxGrad, SumSquares,
    Transpose, Unary, UnaryGrad, UnaryKind, ZeroPadding,
};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Form, Op, Phase, Program, Role, TensorType};
use phalanx_reference::RefTensor;

use crate::cases::Dice;
use crate::layouts::{Operand, random_mesh, random_program};
use crate::threads::{Ranks, furthest};

/// An op with operands that fit it.
#[derive(Clone, Debug)]
pub struct OpInstance {
    /// The op.
    pub op: Op,
    /// Its operands, each with its role.
    pub operands: Vec<(RefTensor, Role)>,
    /// Whether they are units.
    pub form: Form,
}

const F64: DType = DType::F64;

/// How far results on ranks may be from the interpreter's. Shares of partial sums in single precision
/// are rounded each by itself.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-6,
        DType::Bf16 => 0.05,
        _ => 1e-12,
    }
}

impl OpInstance {
    /// Runs it in a random layout for each of these seeds, and compares with the interpreter. Says how
    /// many layouts were legal and ran, or what was wrong in the first.
    pub fn in_random_layouts<E, F>(
        &self,
        seeds: Range<u64>,
        ranks: &mut Ranks<E, F>,
    ) -> Result<usize, String>
    where
        E: Engine + Send,
        F: Fn(Box<dyn Communicator>) -> E + Sync,
    {
        let tensors: Vec<RefTensor> = self.operands.iter().map(|(t, _)| t.clone()).collect();
        let expected = apply(&self.op, &tensors);
        let operands: Vec<Operand> = (self.operands.iter())
            .map(|(t, role)| {
                // Scalars and factors are none.
                let unit = t.shape().len() == 1 && t.shape() == tensors[0].shape();
                let form = if unit { self.form } else { Form::Tensor };
                ((t.dtype(), t.shape().to_vec()), form, *role)
            })
            .collect();
        let mut ran = 0;
        for seed in seeds {
            let mut dice = Dice::new(seed);
            let mesh = random_mesh(&mut dice);
            let Some(program) = random_program(&self.op, &operands, &mesh, &mut dice) else {
                continue;
            };
            let before = dice.percent(30).then_some(0.75);
            let found = match ranks.run(&program, &tensors, before) {
                Ok(found) => found,
                // Said in so many words where a kernel knows blocks alone.
                Err(why) if why.contains("in blocks") => continue,
                Err(why) => return Err(format!("seed {seed}: {why}\n{program}")),
            };
            for ((port, found), expected) in program.outputs().iter().zip(&found).zip(&expected) {
                let more = before.filter(|_| port.role == Role::Gradient).unwrap_or(0.0);
                let values: Vec<f64> = expected.values().iter().map(|x| x + more).collect();
                let expected = RefTensor::new(expected.dtype(), expected.shape(), &values).unwrap();
                let off = furthest(found, &expected);
                if off > tolerance(expected.dtype()) {
                    let (found, expected) = (found.values(), expected.values());
                    return Err(format!(
                        "seed {seed}, before {before:?}: {} is off by {off:e}\n{program}found \
                         {found:?}\nexpected {expected:?}",
                        port.name
                    ));
                }
            }
            ran += 1;
        }
        Ok(ran)
    }
}

fn normal(name: &str, shape: &[usize]) -> RefTensor {
    RefTensor::normal(F64, shape, Stream::named(5, name))
}

fn positive(name: &str, shape: &[usize]) -> RefTensor {
    let values: Vec<f64> = normal(name, shape).values().iter().map(|x| x * x + 0.1).collect();
    RefTensor::new(F64, shape, &values).unwrap()
}

/// Ids below a bound; every fifth is negative if some are ignored.
fn ids(shape: &[usize], bound: u32, ignored: bool) -> RefTensor {
    let ids = RefTensor::ids(shape, bound, Stream::named(6, "ids")).values();
    let values: Vec<i32> = (ids.iter().enumerate())
        .map(|(i, &id)| if ignored && i % 5 == 3 { -1 } else { id as i32 })
        .collect();
    RefTensor::from_i32(shape, &values).unwrap()
}

/// A program of one op, and its inputs.
pub fn alone(op: &Op, operands: &[RefTensor]) -> (Program, Vec<(String, RefTensor)>) {
    let mut program = Program::new("alone", phalanx_ir::Mesh::single());
    let named: Vec<(String, RefTensor)> =
        (operands.iter().enumerate()).map(|(i, t)| (format!("in{i}"), t.clone())).collect();
    let inputs: Vec<_> = (named.iter())
        .map(|(name, t)| program.input(name, Role::Data, TensorType::new(t.dtype(), t.shape())))
        .collect();
    let outputs = program.push(op.clone(), &inputs, Phase::F).unwrap();
    for (i, value) in outputs.into_iter().enumerate() {
        program.output(format!("out{i}"), Role::Probe, value);
    }
    (program, named)
}

/// The results of an op, by the interpreter.
pub fn apply(op: &Op, operands: &[RefTensor]) -> Vec<RefTensor> {
    let (program, inputs) = alone(op, operands);
    let named: Vec<(&str, RefTensor)> =
        inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let outputs = phalanx_reference::run(&program, &named).unwrap();
    outputs.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Every op but collectives, whose operands only a mesh has.
pub fn every() -> Vec<OpInstance> {
    let mut cases = Cases(Vec::new());
    cases.products();
    cases.elementwise();
    cases.shapes();
    cases.rows();
    cases.windows();
    cases.losses();
    cases.positions();
    cases.routing();
    cases.grouped();
    cases.updates();
    let found: BTreeSet<&str> = cases.0.iter().map(|case| case.op.variant()).collect();
    let all = Op::VARIANTS.iter().copied().filter(|&variant| variant != "Collective");
    assert_eq!(found, all.collect(), "every op is there");
    cases.0
}

struct Cases(Vec<OpInstance>);

impl Cases {
    fn add(&mut self, op: impl Into<Op>, operands: &[&RefTensor]) {
        let operands = operands.iter().map(|&t| (t.clone(), Role::Data)).collect();
        self.0.push(OpInstance { op: op.into(), operands, form: Form::Tensor });
    }

    /// The last operand is a random key.
    fn add_keyed(&mut self, op: impl Into<Op>, operands: &[&RefTensor]) {
        self.add(op, operands);
        if let Some((_, role)) = self.0.last_mut().and_then(|c| c.operands.last_mut()) {
            *role = Role::Random;
        }
    }

    fn products(&mut self) {
        for spec in [
            "bsd,de->bse",
            "bse,de->bsd",
            "bsd,bse->de",
            "bshd,bthd->bhst",
            "bhst,bthd->bshd",
            "ab,bc->ca",
            "abc,abd->cd",
            "abc,bcd->ad",
        ] {
            let size = |c: char| 2 + (c as usize * 7) % 5;
            let (left, right) = spec.split_once("->").unwrap();
            let (x, y) = left.split_once(',').unwrap();
            let shape = |s: &str| s.chars().map(size).collect::<Vec<_>>();
            let (a, b, c) =
                (normal("a", &shape(x)), normal("b", &shape(y)), normal("c", &shape(right)));
            let matmul = |add| Matmul { spec: spec.parse().unwrap(), out: F64, add };
            self.add(matmul(false), &[&a, &b]);
            self.add(matmul(true), &[&a, &b, &c]);
            let other = normal("other", &shape(y));
            let packed = PackedMatmul { spec: spec.parse().unwrap(), out: F64 };
            self.add(packed, &[&a, &b, &other]);
        }
    }

    fn elementwise(&mut self) {
        let (x, y, row) = (normal("x", &[3, 5]), positive("y", &[3, 5]), normal("row", &[5]));
        self.add(Unary { kind: UnaryKind::Tanh }, &[&x]);
        self.add(UnaryGrad { kind: UnaryKind::Gelu }, &[&x, &y]);
        for kind in [BinaryKind::Add, BinaryKind::Mul, BinaryKind::Div, BinaryKind::Max] {
            self.add(Binary { kind }, &[&x, &y]);
        }
        self.add(Binary { kind: BinaryKind::Mul }, &[&x, &row]);
        self.add(Binary { kind: BinaryKind::Sub }, &[&x, &RefTensor::scalar(F64, 0.7)]);
        let mask = apply(&Compare { kind: CompareKind::Lt }.into(), &[x.clone(), y.clone()]);
        self.add(Compare { kind: CompareKind::Lt }, &[&x, &y]);
        self.add(Select, &[&mask[0], &x, &y]);
        self.add(Scale { by: -2.0 }, &[&x]);
        self.add(Shift { by: 1.5 }, &[&x]);
        self.add(Cast { to: DType::F32 }, &[&x]);
        self.add(Fill { dtype: F64, shape: vec![3, 5], value: 2.5 }, &[]);
        let step = |op: Op, args| FusedStep { op, args, dtype: F64 };
        let steps = vec![
            step(
                Binary { kind: BinaryKind::Mul }.into(),
                vec![FusedArg::Input(0), FusedArg::Input(1)],
            ),
            step(Unary { kind: UnaryKind::Silu }.into(), vec![FusedArg::Step(0)]),
        ];
        self.add(Fused { steps, results: vec![0, 1], full: 0 }, &[&x, &row]);
        self.add(ZeroPadding, &[&x]);
    }

    fn shapes(&mut self) {
        let x = normal("x", &[3, 4, 5]);
        for dims in [vec![0], vec![1], vec![2], vec![0, 2], vec![1, 2], vec![0, 1, 2]] {
            self.add(Reduce { kind: ReduceKind::Sum, dims: dims.clone(), out: F64 }, &[&x]);
            self.add(Reduce { kind: ReduceKind::Max, dims, out: F64 }, &[&x]);
        }
        self.add(Broadcast { shape: vec![3, 2, 4, 5], dims: vec![1] }, &[&x]);
        self.add(Broadcast { shape: vec![3, 4, 5, 6], dims: vec![3] }, &[&x]);
        for shape in [vec![12, 5], vec![3, 20], vec![60], vec![3, 2, 2, 5], vec![6, 10]] {
            self.add(Reshape { shape }, &[&x]);
        }
        self.add(Transpose { perm: vec![2, 0, 1] }, &[&x]);
        self.add(Transpose { perm: vec![0, 2, 1] }, &[&x]);
        for dim in 0..3 {
            self.add(Slice { dim, start: 1, len: 2 }, &[&x]);
            self.add(Pad { dim, before: 2, after: 1 }, &[&x]);
            let mut shape = vec![3, 4, 5];
            shape[dim] = 2;
            self.add(Concat { dim }, &[&x, &normal("y", &shape), &x]);
        }
        self.add(SumSquares, &[&x]);
    }

    fn rows(&mut self) {
        let (x, dy) = (normal("x", &[2, 3, 7]), normal("dy", &[2, 3, 7]));
        let (gain, bias) = (normal("gain", &[7]), normal("bias", &[7]));
        let rms: Op = RmsNorm { eps: 1e-3 }.into();
        let kept = apply(&rms, &[x.clone(), gain.clone()]);
        self.add(rms, &[&x, &gain]);
        self.add(RmsNormGrad { out: F64 }, &[&x, &gain, &kept[1], &dy]);
        let layer: Op = LayerNorm { eps: 1e-3 }.into();
        let kept = apply(&layer, &[x.clone(), gain.clone(), bias.clone()]);
        self.add(layer, &[&x, &gain, &bias]);
        self.add(LayerNormGrad { out: F64 }, &[&x, &gain, &kept[1], &kept[2], &dy]);
        let y = apply(&Softmax.into(), std::slice::from_ref(&x));
        self.add(Softmax, &[&x]);
        self.add(SoftmaxGrad, &[&y[0], &dy]);
    }

    fn losses(&mut self) {
        let (logits, targets) = (normal("x", &[2, 5, 7]), ids(&[2, 5], 7, true));
        let kept = apply(&CrossEntropy.into(), &[logits.clone(), targets.clone()]);
        self.add(CrossEntropy, &[&logits, &targets]);
        self.add(CrossEntropyGrad, &[&logits, &targets, &kept[1], &normal("dnll", &[2, 5])]);
        let (x, scale) = (normal("x", &[2, 5, 3]), RefTensor::scalar(F64, 0.3));
        for (transposed, shape) in [(false, [3, 7]), (true, [7, 3])] {
            let op = LinearCrossEntropy { transposed, chunk: 4, out: F64 };
            self.add(op, &[&x, &normal("w", &shape), &targets, &scale]);
        }
        let (table, chosen) = (normal("table", &[7, 3]), ids(&[2, 5], 7, false));
        self.add(Embedding, &[&table, &chosen]);
        self.add(EmbeddingGrad { vocab: 7, out: F64 }, &[&chosen, &normal("dy", &[2, 5, 3])]);
    }

    fn positions(&mut self) {
        let key = RefTensor::from_i32(&[5], &[7, 1, 3, 2, 40]).unwrap();
        for shape in [vec![3, 5, 2], vec![6], vec![4, 7]] {
            self.add_keyed(Dropout { p: 0.4, site: 3 }, &[&normal("x", &shape), &key]);
            for kind in NoiseKind::ALL {
                self.add_keyed(Noise { kind, site: 5 }, &[&normal("x", &shape), &key]);
            }
        }
        for inverse in [false, true] {
            let rotary = Rotary { theta: 100.0, scaling: RopeScaling::None, inverse };
            self.add(rotary, &[&normal("x", &[2, 5, 3, 4])]);
        }
        for kind in [AttentionKind::Flash, AttentionKind::Materialised] {
            for (causal, dropout, [s, t], [h, g]) in [
                (false, 0.0, [5, 4], [4, 2]),
                (true, 0.0, [5, 5], [3, 1]),
                (true, 0.3, [5, 7], [4, 2]),
                (true, 0.3, [6, 4], [2, 1]),
                (true, 0.3, [4, 4], [3, 3]),
            ] {
                let of = Attention { kind, causal, dropout, site: 2 };
                let q = normal("q", &[2, s, h, 2]);
                let (k, v) = (normal("k", &[2, t, g, 2]), normal("v", &[2, t, g, 2]));
                let mut operands = vec![q.clone(), k.clone(), v.clone()];
                operands.extend(of.drops().then(|| key.clone()));
                let kept = apply(&of.into(), &operands);
                self.attend(of.into(), of.drops(), &operands);
                operands.truncate(3);
                operands.extend(kept);
                operands.push(normal("do", &[2, s, h, 2]));
                operands.extend(of.drops().then(|| key.clone()));
                self.attend(AttentionGrad { of }.into(), of.drops(), &operands);
                match kind {
                    AttentionKind::Flash => self.steps(of, &operands),
                    AttentionKind::Materialised => self.key_products(of, &operands),
                }
            }
        }
    }

    /// Steps of an attention, first ones and later ones, from the operands of its gradient.
    fn steps(&mut self, of: Attention, operands: &[RefTensor]) {
        let key = &operands[6..];
        let first = [&operands[..3], key].concat();
        self.attend(Attend { of, goes_on: false }.into(), of.drops(), &first);
        let later = [&operands[..5], key].concat();
        self.attend(Attend { of, goes_on: true }.into(), of.drops(), &later);
        self.attend(AttendGrad { of, goes_on: false }.into(), of.drops(), operands);
        let later = [&operands[..6], &operands[..3], key].concat();
        self.attend(AttendGrad { of, goes_on: true }.into(), of.drops(), &later);
    }

    /// Products with stored scores, first steps and later ones, from the operands of a gradient.
    fn key_products(&mut self, of: Attention, operands: &[RefTensor]) {
        let [q, k, p] = [&operands[0], &operands[1], &operands[4]];
        for goes_on in [false, true] {
            for (form, causal, own, so_far) in [
                (KeyForm::Scores, of.causal, [q, k], p),
                (KeyForm::Weighted, false, [p, k], q),
                (KeyForm::Sums, false, [p, q], k),
            ] {
                let op = KeyProduct { form, key_heads: k.shape()[2], causal, goes_on };
                let so_far = goes_on.then_some(so_far);
                self.add(op, &own.into_iter().chain(so_far).collect::<Vec<_>>());
            }
        }
    }

    fn attend(&mut self, op: Op, keyed: bool, operands: &[RefTensor]) {
        let operands: Vec<&RefTensor> = operands.iter().collect();
        if keyed { self.add_keyed(op, &operands) } else { self.add(op, &operands) }
    }

    fn updates(&mut self) {
        let of = |name: &str, elements| normal(name, &[elements]);
        let (w, g, m, v) = (of("w", 11), of("g", 11), of("m", 11), positive("v", &[11]));
        // Two blocks of three members, with gaps.
        let bounds = Bounds { members: vec![(0, 3), (3, 5), (7, 10)], block: 11 };
        let packed = of("packed", 22);
        let [lr, step, clip] = [0.1, 3.0, 0.5].map(|x| RefTensor::scalar(F64, x));
        let [go, stop] = [1.0, 0.0].map(|x| RefTensor::scalar(F64, x));
        let decay = Decay { rate: 0.1, first: 2, block: 5 };
        let adamw = AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-3,
            decay,
            coupled: false,
            narrow: Narrow::None,
        };
        let adam = AdamW { coupled: true, ..adamw };
        let lion = Lion { beta1: 0.9, beta2: 0.99, decay, narrow: Narrow::None };
        let lamb = LambDirection { beta1: 0.9, beta2: 0.95, eps: 1e-3, decay };
        let sgd = Sgd { momentum: 0.9, nesterov: true, decay, narrow: Narrow::None };
        for form in [Form::Tensor, Form::Unit] {
            let first = self.0.len();
            self.add(adamw, &[&w, &g, &m, &v, &lr, &step, &clip]);
            self.add(adam, &[&w, &g, &m, &v, &lr, &step, &clip]);
            self.add(lamb, &[&w, &g, &m, &v, &lr, &step, &clip]);
            self.add(sgd, &[&w, &g, &m, &lr, &step, &clip]);
            self.add(lion, &[&w, &g, &m, &lr, &step, &clip]);
            for go in [&go, &stop] {
                self.add(adamw, &[&w, &g, &m, &v, &lr, &step, &clip, go]);
                self.add(lamb, &[&w, &g, &m, &v, &lr, &step, &clip, go]);
                self.add(sgd, &[&w, &g, &m, &lr, &step, &clip, go]);
                self.add(lion, &[&w, &g, &m, &lr, &step, &clip, go]);
            }
            self.add(SumSquares, &[&w]);
            self.add(ZeroPadding, &[&w]);
            self.add(MemberSquares { bounds: bounds.clone() }, &[&packed]);
            self.add(MemberScale { bounds: bounds.clone() }, &[&packed, &of("factors", 3)]);
            self.factors(&clip, [&go, &stop]);
            self.split_updates();
            self.0[first..].iter_mut().for_each(|case| case.form = form);
        }
    }
}
