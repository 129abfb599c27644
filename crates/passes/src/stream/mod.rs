//! Streams: what is gathered for a computation comes block by block instead.
//!
//! Products over gathered operands become steps ([`products`]), and an attention over gathered keys
//! becomes a ring.
//!
//! Where keys and values of a sequence that an axis shards are gathered for an attention, each rank
//! passes blocks on instead, until every block was everywhere. No rank holds all keys at once; the
//! gather, and in the backward the reduce-scatter, are gone. Without stored scores that is Ring
//! Attention ([`ring`]), with them Ring Self-Attention ([`scored`]).
//!
//! It runs on the joint graph, so that a recomputed clone has the same steps and the same bits.

mod chains;
mod order;
mod products;
mod ring;
mod scored;

use phalanx_ir::ops::{Attention, AttentionKind, Cast, Collective, CollectiveKind};
use phalanx_ir::{Axis, Graph, Instr, Op, Phase, Program, Rewriter, TensorType, ValueId};

/// Turns attentions whose keys are gathered over these axes into rings, and products whose operands are
/// gathered or whose results are scattered over them into steps.
pub fn stream(program: &Program, axes: &[Axis]) -> Program {
    match axes {
        [] => program.clone(),
        _ => products::stream_products(&stream_keys(program, axes), axes),
    }
}

/// The first of both alone: attentions become rings.
pub fn stream_keys(program: &Program, axes: &[Axis]) -> Program {
    let graph = Graph::new(program);
    let mut scattered = vec![false; program.instrs().len()];
    let mut rewriter = Rewriter::new(program);
    for (index, instr) in program.instrs().iter().enumerate() {
        if scattered[index] {
            continue;
        }
        match Ring::of(program, &graph, instr, axes) {
            None => rewriter.keep(index),
            Some(ring) => {
                for at in ring.scatters.into_iter().flatten() {
                    scattered[at] = true;
                }
                ring.emit(&mut rewriter);
            }
        }
    }
    rewriter.finish()
}

/// An attention, or its gradient, that can be a ring.
struct Ring<'a> {
    program: &'a Program,
    instr: &'a Instr,
    of: Attention,
    /// Keys and values as each rank holds them.
    own: [ValueId; 2],
    /// How many blocks there are.
    blocks: usize,
    /// Of a gradient: the reduce-scatters of dk and dv, by their index.
    scatters: Option<[usize; 2]>,
}

impl<'a> Ring<'a> {
    fn of(
        program: &'a Program,
        graph: &Graph<'_>,
        instr: &'a Instr,
        axes: &[Axis],
    ) -> Option<Self> {
        let (of, backward) = match instr.op {
            Op::Attention(of) => (of, false),
            Op::AttentionGrad(grad) => (grad.of, true),
            _ => return None,
        };
        // Queries and keys are cut in the same way, so that a rank's block goes once around.
        let cut = |value: ValueId| &program.ty(value).layout.dims()[1];
        let over = &cut(instr.inputs[0]).axes;
        let asked = !over.is_empty() && over.iter().all(|axis| axes.contains(axis));
        let gathered = |value: ValueId| {
            let (_, made) = graph.making(value).filter(|_| asked)?;
            is(made, &CollectiveKind::AllGather { dim: 1 }, over).then(|| made.inputs[0])
        };
        let own = [gathered(instr.inputs[1])?, gathered(instr.inputs[2])?];
        if own.iter().any(|&value| cut(value) != cut(instr.inputs[0])) {
            return None;
        }
        let scatter = |value: ValueId| {
            let &[reader] = graph.readers(value) else { return None };
            let kind = CollectiveKind::ReduceScatter { dim: 1 };
            let last = !program.outputs().iter().any(|port| port.value == value);
            (last && is(&program.instrs()[reader], &kind, over)).then_some(reader)
        };
        let scatters = match backward {
            true => Some([scatter(instr.outputs[1])?, scatter(instr.outputs[2])?]),
            false => None,
        };
        let blocks = program.mesh().count(over);
        let ring = Self { program, instr, of, own, blocks, scatters };
        let fits = match of.kind {
            AttentionKind::Flash => true,
            AttentionKind::Materialised => ring.has_whole_rows(),
        };
        fits.then_some(ring)
    }

    fn emit(&self, to: &mut Rewriter<'_>) {
        match (self.of.kind, self.scatters) {
            (AttentionKind::Flash, None) => self.forward(to),
            (AttentionKind::Flash, Some(scatters)) => self.backward(to, scatters),
            (AttentionKind::Materialised, None) => self.forward_scored(to),
            (AttentionKind::Materialised, Some(scatters)) => self.backward_scored(to, scatters),
        }
    }

    fn phase(&self) -> Phase {
        self.instr.phase
    }

    /// The random key, if there is dropout; it is the last operand.
    fn key(&self, to: &Rewriter<'_>) -> Option<ValueId> {
        let last = *self.instr.inputs.last()?;
        self.of.drops().then(|| to.resolve(last))
    }

    fn wide(&self, old: ValueId) -> TensorType {
        let ty = self.program.ty(old);
        ty.with_dtype(ty.dtype.accumulator())
    }

    /// Every rank passes its block on.
    fn turn(&self, to: &mut Rewriter<'_>, value: ValueId) -> ValueId {
        let ty = to.ty(value);
        let ty = ty.with_layout(ty.layout.turned(1, self.program.mesh()));
        let axes = ty.layout.axes(1).to_vec();
        let turn = Collective::new(CollectiveKind::Turn { dim: 1 }, axes);
        to.add(turn, &[value], vec![ty], self.phase())[0]
    }

    /// The type of the sums of gradients of a block of keys, which come home as this old value.
    fn sums(&self, to: &Rewriter<'_>, block: ValueId, home: ValueId) -> TensorType {
        let (block, partial) = (to.ty(block), self.program.ty(home).layout.partial().clone());
        let layout = block.layout.with_partial(partial).expect("sums over other axes");
        block.with_layout(layout).with_dtype(block.dtype.accumulator())
    }

    /// The values that the reduce-scatters of dk and dv give.
    fn homes(&self, scatters: [usize; 2]) -> [ValueId; 2] {
        scatters.map(|at| self.program.instrs()[at].outputs[0])
    }

    /// Makes a value of the accumulator type stand for one of the old program.
    fn rounded(&self, to: &mut Rewriter<'_>, wide: ValueId, old: ValueId) {
        let ty = self.program.ty(old).clone();
        let value = match to.ty(wide).dtype == ty.dtype {
            true => wide,
            false => to.add(Cast { to: ty.dtype }, &[wide], vec![ty], self.phase())[0],
        };
        to.bind(old, value);
    }
}

fn is(instr: &Instr, kind: &CollectiveKind, axes: &[Axis]) -> bool {
    matches!(&instr.op, Op::Collective(c) if c.kind == *kind && c.axes == axes)
}
