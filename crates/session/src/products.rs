//! The matrix products of a model's linear layers, and how fast an engine computes them alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_call::{ALIGN, Lane, Slots, Tier};
use phalanx_cost::Product as Sides;
use phalanx_engine::{Engine, KernelCall, Span, Target};
use phalanx_ir::{Builder, DType, Model, Op, OpDef, Program, Role, TensorType, ValueId};

use crate::encode;
use crate::numbers::decode;
use phalanx_error::Result;

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
pub struct TimedProduct {
    /// Which product.
    pub pass: Pass,
    /// Rows of the layer's input: the tokens of a micro-batch, or a rank's share of them.
    pub rows: usize,
    /// Width of its input.
    pub from: usize,
    /// Width of its output.
    pub to: usize,
    /// Whether the weight is stored as `[to, from]`, as a tied head's is.
    pub transposed: bool,
}

impl TimedProduct {
    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        // The gradients' products have the same sides in other roles, so they have as many FLOPs.
        Sides { batch: 1, rows: self.rows, cols: self.to, inner: self.from }.flops()
    }

    /// A product of similar shape with at most `flops`: its longest sides are halved.
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

    /// How many repetitions make at least `work` FLOPs.
    pub fn repeats(&self, work: u64) -> u64 {
        work.div_ceil(self.flops().max(1)).max(1)
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

/// The products that one rank does in the linear layers and the head for one micro-batch, each with
/// its number of occurrences. Attention's own products are not included. `forward` gives the
/// forward program of each segment: the model's own for all ranks together, a partitioned one for a
/// rank.
pub fn products<'p>(
    model: &Model,
    forward: impl Fn(usize) -> &'p Program,
) -> BTreeMap<TimedProduct, usize> {
    let mut products = BTreeMap::new();
    for instance in model.instances() {
        for product in segment_products(forward(instance.segment)) {
            *products.entry(product).or_default() += 1;
        }
    }
    products
}

/// When an engine began a round of a product, and when it was done.
pub type Round = (Instant, Instant);

/// How long products are timed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most rounds of each product; there is at least one.
    pub rounds: usize,
    /// FLOPs of a round, if its share of `seconds` is enough for them; at least one product is run.
    pub work: u64,
    /// About how long all rounds of all products together may take.
    pub seconds: f64,
}

/// The rounds of one product on one rank.
#[derive(Clone, Debug)]
pub struct ProductRounds {
    /// How often the product is run in a round: the same on all ranks.
    pub repeats: u64,
    /// The rounds: as many on all ranks and for all products.
    pub rounds: Vec<Round>,
}

/// Runs each product alone on all threads of a new engine, in rounds. All `ranks` synchronise before
/// each round, so that they begin together. Each product is run twice before, to warm up and to
/// choose its repetitions. Ranks have different clocks, so what depends on time is decided by the
/// mean of all: they must take the same rounds, or some would wait without end.
pub fn time_products<E: Engine>(
    engine: &mut E,
    products: &[TimedProduct],
    [compute, grads]: [DType; 2],
    limits: Limits,
    ranks: usize,
) -> Result<Vec<ProductRounds>> {
    let mut calls = Vec::new();
    let mut arena = 0;
    for product in products {
        let (call, end) = placed(engine, &product.program(compute, grads)?, &[0], 0)?;
        arena = arena.max(end);
        calls.push(call);
    }
    let mut meeting = Meeting::place(engine, ranks, arena)?;
    engine.reserve(Tier::Device, meeting.end)?;
    fill(engine, arena, compute)?;
    meeting.prepare(engine)?;
    let begun = Instant::now();
    let share = limits.seconds / (limits.rounds * products.len()).max(1) as f64;
    let (mut steps, mut timed) = (Vec::new(), Vec::new());
    for (call, product) in calls.into_iter().zip(products) {
        let mut step = engine.prepare([call].into())?;
        run(engine, &mut step)?;
        let once = Instant::now();
        run(engine, &mut step)?;
        let once = meeting.mean(engine, once.elapsed().as_secs_f64())?;
        let repeats = product.repeats(limits.work).min((share / once) as u64).max(1);
        steps.push(step);
        timed.push(ProductRounds { repeats, rounds: Vec::with_capacity(limits.rounds) });
    }
    for _ in 0..limits.rounds {
        for (step, timed) in steps.iter_mut().zip(&mut timed) {
            meeting.mean(engine, 0.0)?;
            let begun = Instant::now();
            (0..timed.repeats).try_for_each(|_| run(engine, step))?;
            timed.rounds.push((begun, Instant::now()));
        }
        if meeting.mean(engine, begun.elapsed().as_secs_f64())? > limits.seconds {
            break;
        }
    }
    Ok(timed)
}

/// A sum over all ranks, used as a barrier: it ends on no rank before all have begun it.
struct Meeting<E: Engine> {
    ranks: usize,
    call: Option<KernelCall<E::Kernel>>,
    step: Option<E::Step>,
    /// Where its number is, before and after.
    spans: Option<(Span, Span)>,
    /// Where its memory ends.
    end: usize,
}

impl<E: Engine> Meeting<E> {
    /// A meeting whose memory begins at an offset: it has its own, because products read theirs
    /// again.
    fn place(engine: &mut E, ranks: usize, from: usize) -> Result<Self> {
        if ranks <= 1 {
            return Ok(Self { ranks: 1, call: None, step: None, spans: None, end: from });
        }
        let program = phalanx_ir::text::parse(&format!(
            "mesh dp={ranks}
program meeting {{
  x: gradient f32[8]{{P:dp}}
  %1 = all_reduce<dp>(x) : f32[8]
  return sum: gradient %1
}}"
        ))?;
        let all: Vec<usize> = (0..ranks).collect();
        let (call, end) = placed(engine, &program, &all, from)?;
        let spans = Some((call.inputs[0], call.outputs[0].span));
        Ok(Self { ranks, call: Some(call), step: None, spans, end })
    }

    /// Makes it ready, once there is memory.
    fn prepare(&mut self, engine: &mut E) -> Result<()> {
        if let Some(call) = self.call.take() {
            self.step = Some(engine.prepare([call].into())?);
        }
        Ok(())
    }

    /// Waits for all ranks; returns the mean of what they bring, the same number on each.
    fn mean(&mut self, engine: &mut E, own: f64) -> Result<f64> {
        let (Some(step), Some((into, from))) = (&mut self.step, self.spans) else {
            return Ok(own);
        };
        let mut bytes = [0; 32];
        encode(DType::F32, &[own; 8], &mut bytes);
        engine.upload(into, &bytes)?;
        run(engine, step)?;
        engine.download(from, &mut bytes)?;
        Ok(decode(DType::F32, &bytes)[0] / self.ranks as f64)
    }
}

/// Fills an arena with numbers of ordinary size, piece by piece.
fn fill<E: Engine>(engine: &mut E, arena: usize, dtype: DType) -> Result<()> {
    const PIECE: usize = 1 << 16;
    let numbers: Vec<f64> =
        (0..PIECE / dtype.size()).map(|i| (i % 17) as f64 * 0.1 - 0.8).collect();
    let mut piece = vec![0; PIECE];
    encode(dtype, &numbers, &mut piece);
    for offset in (0..arena).step_by(PIECE) {
        let bytes = PIECE.min(arena - offset);
        engine.upload(Span::device(offset, bytes), &piece[..bytes])?;
    }
    Ok(())
}

/// The median of some numbers.
pub fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let n = numbers.len();
    (numbers[(n - 1) / 2] + numbers[n / 2]) / 2.0
}

/// A call of a compiled program whose ports lie one after the other from an offset; and where they
/// end.
fn placed<E: Engine>(
    engine: &mut E,
    program: &Program,
    ranks: &[usize],
    from: usize,
) -> Result<(KernelCall<E::Kernel>, usize)> {
    let slots = Slots::assign_for(program, &*engine.requirements());
    let kernel = Arc::new(engine.compile(program, &slots, ranks)?);
    let mut end = from;
    let mut place = |bytes: usize| {
        let span = Span::device(end, bytes);
        end = span.end().next_multiple_of(ALIGN);
        span
    };
    let bytes = |value: ValueId| program.ty(value).local_bytes(program.mesh());
    let inputs = program.inputs().iter().map(|port| place(bytes(port.value))).collect();
    let ports = program.outputs().iter();
    let outputs = ports.map(|port| Target { span: place(bytes(port.value)), add: false });
    let outputs = outputs.collect();
    let workspace = place(slots.extent);
    let (lane, after) = (Lane::Compute, Vec::new());
    Ok((KernelCall { kernel, inputs, outputs, workspace, lane, after }, end))
}

fn run<E: Engine>(engine: &mut E, step: &mut E::Step) -> Result<()> {
    engine.begin(step)?;
    Ok(engine.end(step)?)
}

/// The products of one instance of a segment.
pub fn segment_products(forward: &Program) -> Vec<TimedProduct> {
    let params = params(forward);
    let local = |values: &[ValueId]| -> Vec<Vec<usize>> {
        values.iter().map(|&v| forward.ty(v).local_shape(forward.mesh())).collect()
    };
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
        let (x, others, spec) = match (&instr.op, &instr.inputs[..]) {
            (Op::Matmul(op), [x, w, ..]) => (x, std::slice::from_ref(w), &op.spec),
            (Op::PackedMatmul(op), [x, others @ ..]) => (x, others, &op.spec),
            _ => continue,
        };
        let (ins, outs) = (local(&instr.inputs), local(&instr.outputs));
        let all = instr.op.products(&slices(&ins), &slices(&outs));
        for (w, sides) in others.iter().zip(all) {
            if !params[w.index()] || forward.ty(*w).shape.len() != 2 {
                continue;
            }
            let [_, letters, out] = spec.letters();
            let transposed = letters.chars().next() == out.chars().last();
            let Sides { batch, rows, cols: to, inner: from } = sides;
            let product = |pass| TimedProduct { pass, rows: batch * rows, from, to, transposed };
            products.extend([Pass::Forward, Pass::WeightGradient].map(product));
            if differentiated[x.index()] {
                products.push(product(Pass::InputGradient));
            }
        }
    }
    products
}

fn slices(shapes: &[Vec<usize>]) -> Vec<&[usize]> {
    shapes.iter().map(Vec::as_slice).collect()
}

/// For each value: whether it is a parameter, in its stored form or in another type or layout.
fn params(program: &Program) -> Vec<bool> {
    let mut params = vec![false; program.values().len()];
    for port in program.inputs_with(Role::Param) {
        params[port.value.index()] = true;
    }
    for instr in program.instrs() {
        if let (Op::Cast(_) | Op::Collective(_), [input]) = (&instr.op, &instr.inputs[..]) {
            params[instr.outputs[0].index()] = params[input.index()];
        }
    }
    params
}

#[cfg(test)]
mod tests {
    use phalanx_models::{Architecture, BatchShape, Mlp};
    use phalanx_reference::ReferenceEngine;

    use super::*;
    use phalanx_comm::{RankPool, Threads};
    use phalanx_engine::Counters;

    fn model() -> Model {
        let mlp = Mlp::regression(3, [4, 4], 2);
        mlp.model(BatchShape { batch: 5, seq: 1 }, DType::F32).unwrap()
    }

    /// Three layers have nine products, less the gradient of the data.
    #[test]
    fn every_layer_has_its_products() {
        let model = model();
        let products = products(&model, |segment| &model.segments()[segment]);
        assert_eq!(products.values().sum::<usize>(), 8);
        let flops: u64 = products.iter().map(|(p, n)| p.flops() * *n as u64).sum();
        assert_eq!(flops, 2 * 5 * (2 * 3 * 4 + 3 * 4 * 4 + 3 * 4 * 2));
    }

    #[test]
    fn a_large_product_is_cut_where_it_is_longest() {
        let head = TimedProduct {
            pass: Pass::Forward,
            rows: 4096,
            from: 768,
            to: 50304,
            transposed: true,
        };
        let cut = head.cut(2_000_000_000);
        assert_eq!((cut.rows, cut.from, cut.to), (1024, 768, 786));
        assert_eq!(cut.cut(u64::MAX), cut);
        assert_eq!(head.cut(0).flops(), 2);
    }

    #[test]
    fn each_product_is_a_program_that_runs() {
        let model = model();
        let all: Vec<TimedProduct> = (products(&model, |s| &model.segments()[s]).into_keys())
            .flat_map(|p| [false, true].map(|transposed| TimedProduct { transposed, ..p }))
            .collect();
        let types = [DType::Bf16, DType::F32];
        let times =
            time_products(&mut ReferenceEngine::new(), &all, types, limits(60.0), 1).unwrap();
        assert_eq!(times.len(), 16);
        let rounds: Vec<&Round> = times.iter().flat_map(|timed| &timed.rounds).collect();
        assert_eq!(rounds.len(), 2 * 16);
        assert!(rounds.iter().all(|(begun, ended)| begun < ended));
    }

    fn limits(seconds: f64) -> Limits {
        Limits { rounds: 2, work: 0, seconds }
    }

    /// Before each round, after the warm-up of each product, and after each sweep over products.
    #[test]
    fn ranks_meet_before_each_round_and_decide_together() {
        let product =
            TimedProduct { pass: Pass::Forward, rows: 2, from: 2, to: 2, transposed: false };
        let met = |seconds| {
            let make = |endpoint| crate::host::rank_engine(1, endpoint);
            let mut crew = RankPool::new(&Threads::new(2), make).unwrap();
            let met = crew.run(|_, engine| {
                time_products(engine, &[product; 3], [DType::F32; 2], limits(seconds), 2)?;
                let moved: Vec<_> = engine.moved().into_iter().collect();
                Ok::<_, phalanx_error::Error>(moved.iter().map(|(r, m)| (r.op, m.calls)).collect())
            });
            let met: Vec<Vec<(&str, u64)>> = met.unwrap();
            met
        };
        assert_eq!(met(60.0), vec![vec![("all_reduce", 3 + 2 * (3 + 1))]; 2]);
        // Without time there is one round, and each product runs once in it.
        assert_eq!(met(0.0), vec![vec![("all_reduce", 3 + (3 + 1))]; 2]);
    }

    /// However small products are, a round of them takes no longer than its share.
    #[test]
    fn repetitions_are_bounded_by_time() {
        let small =
            TimedProduct { pass: Pass::Forward, rows: 2, from: 2, to: 2, transposed: false };
        let limits = Limits { rounds: 1, work: u64::MAX, seconds: 1e-12 };
        let types = [DType::F32; 2];
        let timed = time_products(&mut ReferenceEngine::new(), &[small], types, limits, 1).unwrap();
        assert_eq!((timed[0].repeats, timed[0].rounds.len()), (1, 1));
    }
}
