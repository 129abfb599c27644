//! The matrix products of a model's linear layers, and how fast an engine does them by themselves.

use std::collections::BTreeMap;
use std::time::Instant;

use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::{Builder, DType, Model, Op, Program, Role, TensorType, ValueId};
use phalanx_script::{Lane, Slots, slots::ALIGN};

use crate::error::Result;
use crate::session::encode;

/// Which product of a linear layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Pass {
    /// `y = x·w`: `[rows, from] · [from, to]`.
    Forward,
    /// `dx = dy·wᵀ`: `[rows, to] · [to, from]`.
    InputGradient,
    /// `dw = xᵀ·dy`: `[from, rows] · [rows, to]`.
    WeightGradient,
}

/// A product of a linear layer of this shape.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Product {
    /// Which.
    pub pass: Pass,
    /// Rows of the layer's input: the tokens of a micro-batch.
    pub rows: usize,
    /// Width of its input.
    pub from: usize,
    /// Width of its output.
    pub to: usize,
    /// Whether the weight is stored as `[to, from]`, as a tied head's is.
    pub transposed: bool,
}

impl Product {
    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        2 * (self.rows * self.from * self.to) as u64
    }

    /// A product of much the same shape that takes at most `flops`: its longest sides are halved.
    pub fn cut(mut self, flops: u64) -> Self {
        while self.flops() > flops {
            let longest = self.rows.max(self.from).max(self.to);
            let sides = [&mut self.rows, &mut self.from, &mut self.to];
            let Some(side) = sides.into_iter().find(|side| **side == longest && longest > 1) else {
                break;
            };
            *side = side.div_ceil(2);
        }
        self
    }

    /// The product as a program of one instruction.
    fn program(&self, compute: DType, grads: DType) -> Result<Program> {
        let b = Builder::new("product", compute);
        let value = |name: &str, shape: [usize; 2]| {
            b.input(name, Role::Data, TensorType::new(compute, shape))
        };
        let (x, y) = ([self.rows, self.from], [self.rows, self.to]);
        let (w, letters) = match self.transposed {
            true => ([self.to, self.from], "oi"),
            false => ([self.from, self.to], "io"),
        };
        let result = match self.pass {
            Pass::Forward => value("x", x).einsum(value("w", w), &format!("ri,{letters}->ro")),
            Pass::InputGradient => {
                value("y", y).einsum(value("w", w), &format!("ro,{letters}->ri"))
            }
            Pass::WeightGradient => {
                let spec = format!("ri,ro->{letters}").parse();
                let spec =
                    spec.map_err(|what: String| phalanx_ir::IrError::operands("matmul", what));
                let op = phalanx_ir::ops::Matmul { spec: spec?, out: grads, add: false };
                b.apply(op, &[value("x", x), value("y", y)])
            }
        };
        b.probe("result", result);
        Ok(b.finish()?)
    }
}

/// The products of a model's linear layers and head for one micro-batch, each with how often it
/// occurs. Attention's own products are not among them.
pub fn products(model: &Model) -> BTreeMap<Product, usize> {
    let mut products = BTreeMap::new();
    for instance in model.instances() {
        for product in segment_products(&model.segments()[instance.segment]) {
            *products.entry(product).or_default() += 1;
        }
    }
    products
}

/// How long a product takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Seconds {
    /// The median of some rounds.
    pub median: f64,
    /// The shortest of them.
    pub best: f64,
}

/// How long each product takes by itself on all threads of a new engine, after one round that
/// does not count.
pub fn time_products<E: Engine>(
    engine: &mut E,
    products: &[Product],
    [compute, grads]: [DType; 2],
    rounds: usize,
) -> Result<Vec<Seconds>> {
    let mut ready = Vec::new();
    let mut arena = 0;
    for product in products {
        let call = Call::new(engine, &product.program(compute, grads)?)?;
        arena = arena.max(call.bytes);
        ready.push(call);
    }
    engine.reserve(arena)?;
    fill(engine, arena, compute)?;
    ready
        .iter()
        .map(|call| {
            let mut times = Vec::with_capacity(rounds);
            for round in 0..=rounds {
                let begun = Instant::now();
                call.run(engine)?;
                if round > 0 {
                    times.push(begun.elapsed().as_secs_f64());
                }
            }
            let median = median(&mut times);
            let best = times[0];
            Ok(Seconds { median, best })
        })
        .collect()
}

/// Fills an arena with numbers of ordinary size, piece by piece.
fn fill<E: Engine>(engine: &mut E, arena: usize, dtype: DType) -> Result<()> {
    const PIECE: usize = 1 << 16;
    let numbers: Vec<f64> =
        (0..PIECE / dtype.size()).map(|i| (i % 17) as f64 * 0.1 - 0.8).collect();
    let mut piece = vec![0; PIECE];
    encode(dtype, &numbers, &mut piece);
    for offset in (0..arena).step_by(PIECE) {
        engine.upload(offset, &piece[..PIECE.min(arena - offset)])?;
    }
    Ok(())
}

/// The middle of some numbers, or the mean of the two in the middle.
pub(crate) fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let n = numbers.len();
    (numbers[(n - 1) / 2] + numbers[n / 2]) / 2.0
}

/// A compiled program with places for its ports, one after the other.
struct Call<K> {
    kernel: K,
    inputs: Vec<Span>,
    outputs: Vec<Target>,
    workspace: Span,
    bytes: usize,
}

impl<K> Call<K> {
    fn new<E: Engine<Kernel = K>>(engine: &mut E, program: &Program) -> Result<Self> {
        let slots = Slots::assign(program);
        let kernel = engine.compile(program, &slots)?;
        let mut end = 0;
        let mut place = |bytes: usize| {
            let offset = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            Span { offset, bytes }
        };
        let bytes = |value: ValueId| program.ty(value).local_bytes(program.mesh());
        let ports = program.inputs().iter();
        let inputs = ports.map(|port| place(bytes(port.value))).collect();
        let ports = program.outputs().iter();
        let outputs = ports.map(|port| Target { span: place(bytes(port.value)), add: false });
        let outputs = outputs.collect();
        let workspace = place(slots.extent);
        Ok(Self { kernel, inputs, outputs, workspace, bytes: end })
    }

    fn run<E: Engine<Kernel = K>>(&self, engine: &mut E) -> Result<()> {
        let args = Args { inputs: &self.inputs, outputs: &self.outputs, workspace: self.workspace };
        let event = engine.launch(&self.kernel, &args, Lane::Compute, &[])?;
        Ok(engine.wait(event)?)
    }
}

fn segment_products(forward: &Program) -> Vec<Product> {
    let is_param =
        |value: ValueId| forward.inputs_with(Role::Param).any(|port| port.value == value);
    // What depends on data alone has no gradient.
    let mut differentiated = vec![false; forward.values().len()];
    for port in forward.inputs() {
        differentiated[port.value.index()] = matches!(port.role, Role::Param | Role::Boundary);
    }
    let mut products = Vec::new();
    for instr in forward.instrs() {
        let wanted = instr.inputs.iter().any(|v| differentiated[v.index()]);
        for value in &instr.outputs {
            differentiated[value.index()] = wanted;
        }
        let (Op::Matmul(op), [x, w, ..]) = (&instr.op, &instr.inputs[..]) else {
            continue;
        };
        if !is_param(*w) || forward.ty(*w).shape.len() != 2 {
            continue;
        }
        let weight = &forward.ty(*w).shape;
        let [_, letters, out] = op.spec.letters();
        let transposed = letters.chars().next() == out.chars().last();
        let (from, to) = match transposed {
            true => (weight[1], weight[0]),
            false => (weight[0], weight[1]),
        };
        let rows = forward.ty(*x).shape.iter().product::<usize>() / from;
        let product = |pass| Product { pass, rows, from, to, transposed };
        products.extend([Pass::Forward, Pass::WeightGradient].map(product));
        if differentiated[x.index()] {
            products.push(product(Pass::InputGradient));
        }
    }
    products
}

#[cfg(test)]
mod tests {
    use phalanx_models::{Architecture, BatchShape, Mlp};
    use phalanx_reference::ReferenceEngine;

    use super::*;

    fn model() -> Model {
        let mlp = Mlp {
            inputs: 3,
            hidden: vec![4, 4],
            outputs: 2,
            activation: phalanx_ir::ops::UnaryKind::Relu,
        };
        mlp.model(BatchShape { batch: 5, seq: 1 }, DType::F32).unwrap()
    }

    /// Three layers have nine products, less the gradient of the data.
    #[test]
    fn every_layer_has_its_products() {
        let products = products(&model());
        assert_eq!(products.values().sum::<usize>(), 8);
        let flops: u64 = products.iter().map(|(p, n)| p.flops() * *n as u64).sum();
        assert_eq!(flops, 2 * 5 * (2 * 3 * 4 + 3 * 4 * 4 + 3 * 4 * 2));
    }

    #[test]
    fn a_large_product_is_cut_where_it_is_longest() {
        let head =
            Product { pass: Pass::Forward, rows: 4096, from: 768, to: 50304, transposed: true };
        let cut = head.cut(2_000_000_000);
        assert_eq!((cut.rows, cut.from, cut.to), (1024, 768, 786));
        assert_eq!(cut.cut(u64::MAX), cut);
        assert_eq!(head.cut(0).flops(), 2);
    }

    #[test]
    fn each_product_is_a_program_that_runs() {
        let all: Vec<Product> = (products(&model()).into_keys())
            .flat_map(|p| [false, true].map(|transposed| Product { transposed, ..p }))
            .collect();
        let types = [DType::Bf16, DType::F32];
        let times = time_products(&mut ReferenceEngine::new(), &all, types, 2).unwrap();
        assert_eq!(times.len(), 16);
        assert!(times.iter().all(|t| t.best > 0.0 && t.best <= t.median));
    }
}
