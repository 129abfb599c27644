//! Streams: an attention over gathered keys becomes a ring, in which keys come block by block.
//!
//! Where keys and values of a sequence that an axis shards are gathered for an attention, each rank
//! first attends to its own block of keys, then passes blocks on and attends to the next one, until
//! every block was everywhere. No rank holds all keys at once. In the backward blocks are passed on
//! in the same way, with the sums of their gradients behind them, so that these are complete when
//! they come home; the gather and the reduce-scatter are gone. The own block is taken last there, so
//! sums travel n − 1 times.
//!
//! It runs on the joint graph, so that a recomputed clone has the same steps and the same bits.

use phalanx_ir::ops::{
    Attend, AttendGrad, Attention, AttentionKind, Cast, Collective, CollectiveKind,
};
use phalanx_ir::{Axis, Graph, Instr, Op, Phase, Program, Rewriter, TensorType, ValueId};

/// Turns attentions whose keys are gathered over these axes into rings.
pub fn stream(program: &Program, axes: &[Axis]) -> Program {
    if axes.is_empty() {
        return program.clone();
    }
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
                for at in ring.scatters() {
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
        if of.kind != AttentionKind::Flash {
            return None;
        }
        let gathered = |value: ValueId| {
            let (_, made) = graph.making(value)?;
            is(made, &CollectiveKind::AllGather { dim: 1 }, axes).then(|| made.inputs[0])
        };
        let own = [gathered(instr.inputs[1])?, gathered(instr.inputs[2])?];
        // Queries and keys are cut in the same way, so that a rank's block goes once around.
        let cut = |value: ValueId| &program.ty(value).layout.dims()[1];
        if own.iter().any(|&value| cut(value) != cut(instr.inputs[0])) {
            return None;
        }
        let scatter = |value: ValueId| {
            let &[reader] = graph.readers(value) else { return None };
            let kind = CollectiveKind::ReduceScatter { dim: 1 };
            let last = !program.outputs().iter().any(|port| port.value == value);
            (last && is(&program.instrs()[reader], &kind, axes)).then_some(reader)
        };
        let scatters = match backward {
            true => Some([scatter(instr.outputs[1])?, scatter(instr.outputs[2])?]),
            false => None,
        };
        let blocks = program.mesh().count(axes);
        Some(Self { program, instr, of, own, blocks, scatters })
    }

    fn scatters(&self) -> impl Iterator<Item = usize> {
        self.scatters.into_iter().flatten()
    }

    fn emit(&self, to: &mut Rewriter<'_>) {
        match self.scatters {
            None => self.forward(to),
            Some(scatters) => self.backward(to, scatters),
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

    /// The own block first; the last result is rounded once.
    fn forward(&self, to: &mut Rewriter<'_>) {
        let [o, lse] = [self.instr.outputs[0], self.instr.outputs[1]];
        let q = to.resolve(self.instr.inputs[0]);
        let [mut k, mut v] = self.own.map(|value| to.resolve(value));
        let types = vec![self.wide(o), self.wide(lse)];
        let mut state = Vec::new();
        for step in 0..self.blocks {
            if step > 0 {
                (k, v) = (self.turn(to, k), self.turn(to, v));
            }
            let mut operands = vec![q, k, v];
            operands.extend(&state);
            operands.extend(self.key(to));
            let attend = Attend { of: self.of, goes_on: step > 0 };
            state = to.add(attend, &operands, types.clone(), self.phase());
        }
        self.rounded(to, state[0], o);
        to.bind(lse, state[1]);
    }

    /// The own block last: sums of gradients then come home from the rank before.
    fn backward(&self, to: &mut Rewriter<'_>, scatters: [usize; 2]) {
        let inputs: Vec<ValueId> = self.instr.inputs.iter().map(|&v| to.resolve(v)).collect();
        let (q, kept) = (inputs[0], [inputs[3], inputs[4], inputs[5]]);
        let own = self.own.map(|value| to.resolve(value));
        let homes = scatters.map(|at| self.program.instrs()[at].outputs[0]);
        let dq = self.instr.outputs[0];
        let [mut k, mut v] = own;
        let mut sums: Vec<ValueId> = Vec::new();
        for step in 1..=self.blocks {
            (k, v) = match step == self.blocks {
                true => (own[0], own[1]),
                false => (self.turn(to, k), self.turn(to, v)),
            };
            if step > 1 {
                sums = vec![sums[0], self.turn(to, sums[1]), self.turn(to, sums[2])];
            }
            let mut types = vec![self.wide(dq)];
            types.extend([k, v].map(|value| {
                let partial = self.program.ty(homes[0]).layout.partial().clone();
                wide_sums(to.ty(value), partial)
            }));
            let mut operands = vec![q, k, v];
            operands.extend(kept);
            operands.extend(&sums);
            operands.extend(self.key(to));
            let grad = AttendGrad { of: self.of, goes_on: step > 1 };
            sums = to.add(grad, &operands, types, self.phase());
        }
        self.rounded(to, sums[0], dq);
        self.rounded(to, sums[1], homes[0]);
        self.rounded(to, sums[2], homes[1]);
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

/// The type of the sums of gradients of a block of keys.
fn wide_sums(block: &TensorType, partial: std::collections::BTreeSet<Axis>) -> TensorType {
    let layout = block.layout.with_partial(partial).expect("gradients are sums over other axes");
    block.with_layout(layout).with_dtype(block.dtype.accumulator())
}

fn is(instr: &Instr, kind: &CollectiveKind, axes: &[Axis]) -> bool {
    matches!(&instr.op, Op::Collective(c) if c.kind == *kind && c.axes == axes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::check_on;

    fn over_cp(program: &Program) -> Program {
        crate::dead_code(&stream(program, &[Axis::new("cp").unwrap()]))
    }

    #[test]
    fn keys_come_block_by_block() {
        check_on(
            "cp=3",
            "
            q: boundary bf16[2,12,4,2]{1:cp@zigzag}
            k: boundary bf16[2,12,2,2]{1:cp@zigzag}
            v: boundary bf16[2,12,2,2]{1:cp@zigzag}
            %1 = all_gather<cp>(k, dim=1) : bf16[2,12,2,2]
            %2 = all_gather<cp>(v, dim=1) : bf16[2,12,2,2]
            %3, %4 = attention(q, %1, %2, kind=flash, causal=true, dropout=0, site=1) : bf16[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            return o: boundary %3
            return l: boundary %4",
            over_cp,
            "
            %1, %2 = attend(q, k, v, causal=true, dropout=0, site=1, goes_on=false) : f32[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            %5 = turn<cp>(k, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+1}
            %6 = turn<cp>(v, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+1}
            %7, %8 = attend(q, %5, %6, %1, %2, causal=true, dropout=0, site=1, goes_on=true) : f32[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            %9 = turn<cp>(%5, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+2}
            %10 = turn<cp>(%6, dim=1) : bf16[2,12,2,2]{1:cp@zigzag+2}
            %11, %4 = attend(q, %9, %10, %7, %8, causal=true, dropout=0, site=1, goes_on=true) : f32[2,12,4,2]{1:cp@zigzag}, f32[2,4,12]{2:cp@zigzag}
            %3 = cast(%11, to=bf16) : bf16[2,12,4,2]{1:cp@zigzag}",
        );
    }

    /// One key head on two ranks of tp: sums over the ranks that share it stay sums.
    #[test]
    fn sums_of_gradients_come_home() {
        check_on(
            "cp=2 tp=2",
            "
            q: boundary f32[2,8,2,2]{1:cp 2:tp}
            k: boundary f32[2,8,1,2]{1:cp}
            v: boundary f32[2,8,1,2]{1:cp}
            o: boundary f32[2,8,2,2]{1:cp 2:tp}
            l: boundary f32[2,2,8]{1:tp 2:cp}
            d: boundary f32[2,8,2,2]{1:cp 2:tp}
            %1 = all_gather<cp>(k, dim=1) : f32[2,8,1,2]
            %2 = all_gather<cp>(v, dim=1) : f32[2,8,1,2]
            %3, %4, %5 = attention_grad(q, %1, %2, o, l, d, kind=flash, causal=true, dropout=0, site=1) : f32[2,8,2,2]{1:cp 2:tp}, f32[2,8,1,2]{P:cp,tp}, f32[2,8,1,2]{P:cp,tp}
            %6 = reduce_scatter<cp>(%4, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            %7 = reduce_scatter<cp>(%5, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            return dq: probe %3
            return dk: probe %6
            return dv: probe %7",
            over_cp,
            "
            %1 = turn<cp>(k, dim=1) : f32[2,8,1,2]{1:cp+1}
            %2 = turn<cp>(v, dim=1) : f32[2,8,1,2]{1:cp+1}
            %8, %4, %5 = attend_grad(q, %1, %2, o, l, d, causal=true, dropout=0, site=1, goes_on=false) : f32[2,8,2,2]{1:cp 2:tp}, f32[2,8,1,2]{1:cp+1 P:tp}, f32[2,8,1,2]{1:cp+1 P:tp}
            %9 = turn<cp>(%4, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            %10 = turn<cp>(%5, dim=1) : f32[2,8,1,2]{1:cp P:tp}
            %3, %6, %7 = attend_grad(q, k, v, o, l, d, %8, %9, %10, causal=true, dropout=0, site=1, goes_on=true) : f32[2,8,2,2]{1:cp 2:tp}, f32[2,8,1,2]{1:cp P:tp}, f32[2,8,1,2]{1:cp P:tp}",
        );
    }
}
