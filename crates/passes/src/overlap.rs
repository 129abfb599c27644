//! Overlaps collectives with computation: each is split into a start, as soon as its operand
//! exists, and a done, right before its result is read.
//!
//! Both buffers live from start to done, so a start moves up by at most as many instructions as the
//! caller says; otherwise all parameters would be gathered at once. A collective without
//! computation in between is not split. All ranks run the same program, so they issue collectives
//! in one order. It is the last pass, when instructions are in their final order.

use phalanx_ir::layout::Sharding;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Graph, Instr, Op, OpDef, Order, Phase, Program, TensorType, ValueId};

/// Splits collectives into starts and dones, starting each at most `ahead` instructions early.
pub fn overlap(program: &Program, ahead: usize) -> Program {
    let spans = spans(program, ahead);
    let mut copy = Copy::new(program);
    for at in 0..=program.instrs().len() {
        for (index, span) in spans.iter().enumerate() {
            if span.is_some_and(|s| s.done == at) {
                copy.done(index);
            }
        }
        for (index, span) in spans.iter().enumerate() {
            if span.is_some_and(|s| s.start == at) {
                copy.start(index);
            }
        }
        if at < spans.len() && spans[at].is_none() {
            copy.keep(at);
        }
    }
    copy.finish()
}

/// Before which instructions a collective starts and is waited for.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    done: usize,
}

/// For each instruction: where its start and its done go, if it is a collective that is worth
/// splitting.
fn spans(program: &Program, ahead: usize) -> Vec<Option<Span>> {
    let graph = Graph::new(program);
    let instrs = program.instrs();
    let mut spans: Vec<Option<Span>> = vec![None; instrs.len()];
    // What reads a result may itself start early, so readers come first.
    for (index, instr) in instrs.iter().enumerate().rev() {
        let Some(start) = earliest(program, &graph, index, ahead) else { continue };
        let begins = |&reader: &usize| spans[reader].map_or(reader, |span| span.start);
        let readers = graph.readers(instr.outputs[0]).iter();
        let done = readers.map(begins).min().unwrap_or(instrs.len());
        let mut between = (start..done).filter(|&i| i != index);
        if between.any(|i| computes(&instrs[i])) {
            spans[index] = Some(Span { start, done });
        }
    }
    spans
}

/// Before which instruction a collective can start, if it can be split.
fn earliest(program: &Program, graph: &Graph<'_>, index: usize, ahead: usize) -> Option<usize> {
    let instrs = program.instrs();
    let instr = &instrs[index];
    moving(instr).filter(|_| in_blocks(program, instr))?;
    // A collective right after another one must wait for it anyway.
    let maker = graph.maker(instr.inputs[0]);
    let follows = maker.is_some_and(|m| moving(&instrs[m]).is_some());
    let made = instr.inputs.iter().filter_map(|&value| graph.maker(value)).max();
    let made = made.map_or(0, |m| m + 1);
    let onward = follows && turns(instr) && maker.is_some_and(|m| turns(&instrs[m]));
    let step = is_block(instr).then(|| step_before(instrs, index)).flatten();
    Some(match (onward, follows) {
        // A block is put into what the one before it was put into.
        _ if instr.inputs.len() > 1 && !is_exchange(instr) => index,
        // The blocks of a step are on their way while the step before it is computed.
        _ if step.is_some() => made.max(step.unwrap_or(index)),
        // Blocks go on as soon as they are here, beside what is computed with them.
        (true, _) => graph.readers(instr.inputs[0]).first().map_or(index, |&r| r.min(index)),
        (false, true) => index,
        (false, false) => made.max(index.saturating_sub(ahead)),
    })
}

/// The collective of an instruction, if it moves data between ranks and is not already split.
fn moving(instr: &Instr) -> Option<&Collective> {
    let Op::Collective(collective) = &instr.op else { return None };
    let local = collective.is_local() || collective.kind == CollectiveKind::Done;
    (!local && !collective.start).then_some(collective)
}

/// Whether data only move; in other orders engines also pick elements, before or after.
fn in_blocks(program: &Program, instr: &Instr) -> bool {
    let dims = |value: ValueId| program.ty(value).layout.dims();
    let mut changed = dims(instr.inputs[0]).iter().zip(dims(instr.outputs[0]));
    let dealt = |(from, to): (&Sharding, &Sharding)| {
        from != to && (from.order != Order::Block || to.order != Order::Block)
    };
    turns(instr) || !changed.any(dealt)
}

/// Whether ranks pass their blocks on.
fn turns(instr: &Instr) -> bool {
    matches!(&instr.op, Op::Collective(Collective { kind: CollectiveKind::Turn { .. }, .. }))
}

/// Whether ranks exchange parts of two dims; a second operand is then only read.
fn is_exchange(instr: &Instr) -> bool {
    matches!(&instr.op, Op::Collective(Collective { kind: CollectiveKind::AllToAll { .. }, .. }))
}

/// Whether it brings a block of an operand here.
fn is_block(instr: &Instr) -> bool {
    let Op::Collective(collective) = &instr.op else { return false };
    matches!(collective.kind, CollectiveKind::BroadcastBlock { .. })
}

/// Where the products of the step before this block's begin, if there is one: after its own blocks.
fn step_before(instrs: &[Instr], index: usize) -> Option<usize> {
    let group = (0..index).rev().take_while(|&i| is_block(&instrs[i])).last().unwrap_or(index);
    let of_step = |instr: &Instr| match &instr.op {
        Op::Matmul(_) | Op::PackedMatmul(_) => true,
        Op::Collective(collective) => matches!(
            collective.kind,
            CollectiveKind::TakeBlock { .. }
                | CollectiveKind::PutBlock { .. }
                | CollectiveKind::ReduceBlock { .. }
        ),
        _ => false,
    };
    let first = (0..group).rev().take_while(|&i| of_step(&instrs[i])).last()?;
    (first > 0 && is_block(&instrs[first - 1])).then_some(first)
}

fn computes(instr: &Instr) -> bool {
    !matches!(instr.op, Op::Collective(_)) && !instr.op.is_view()
}

/// A copy of a program in which handles are new values.
struct Copy<'a> {
    old: &'a Program,
    new: Program,
    map: Vec<ValueId>,
    handles: Vec<ValueId>,
}

impl<'a> Copy<'a> {
    fn new(old: &'a Program) -> Self {
        let mut new = Program::new(&old.name, old.mesh().clone());
        let mut map = vec![ValueId(u32::MAX); old.values().len()];
        for port in old.inputs() {
            let ty = old.ty(port.value).clone();
            map[port.value.index()] = new.input_like(port, ty);
        }
        Self { old, new, map, handles: vec![ValueId(u32::MAX); old.instrs().len()] }
    }

    fn keep(&mut self, index: usize) {
        let instr = &self.old.instrs()[index];
        let types = instr.outputs.iter().map(|&v| self.old.ty(v).clone()).collect();
        let inputs: Vec<ValueId> = instr.inputs.iter().map(|v| self.map[v.index()]).collect();
        let made = self.new.push_unchecked(instr.op.clone(), &inputs, types, instr.phase);
        for (old, new) in instr.outputs.iter().zip(made) {
            self.map[old.index()] = new;
        }
    }

    fn start(&mut self, index: usize) {
        let instr = &self.old.instrs()[index];
        let Op::Collective(collective) = &instr.op else { return };
        let mut handle = self.old.ty(instr.outputs[0]).clone();
        handle.pending = true;
        let start = Collective { start: true, ..collective.clone() };
        let inputs: Vec<ValueId> = instr.inputs.iter().map(|v| self.map[v.index()]).collect();
        self.handles[index] = self.push(start, &inputs, handle, instr.phase);
    }

    fn done(&mut self, index: usize) {
        let instr = &self.old.instrs()[index];
        let ty = self.old.ty(instr.outputs[0]).clone();
        let done = Collective::new(CollectiveKind::Done, Vec::new());
        let value = self.push(done, &[self.handles[index]], ty, instr.phase);
        self.map[instr.outputs[0].index()] = value;
    }

    fn push(
        &mut self,
        op: Collective,
        inputs: &[ValueId],
        ty: TensorType,
        phase: Phase,
    ) -> ValueId {
        self.new.push_unchecked(op.into(), inputs, vec![ty], phase)[0]
    }

    fn finish(mut self) -> Program {
        for port in self.old.outputs() {
            self.new.output_like(port, self.map[port.value.index()]);
        }
        self.new.canonical()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_on, check_unchanged};

    #[test]
    fn a_gather_runs_beside_the_product_before_it() {
        let before = "
            x: boundary f32[4,8]
            v: param f32[8,8]
            w: param f32[8,8]{0:dp}
            %1 = matmul(x, v, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %2 = all_gather<dp>(w, dim=0) : f32[8,8]
            %3 = matmul(%1, %2, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            return y: boundary %3";
        let after = "
            %4 = all_gather_start<dp>(w, dim=0) : pending f32[8,8]
            %1 = matmul(x, v, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %2 = done(%4) : f32[8,8]
            %3 = matmul(%1, %2, spec=ay,yz->az, out=f32, add=false) : f32[4,8]";
        check_on("dp=2", before, |p| overlap(p, 8), after);
        check_unchanged("dp=2", before, |p| overlap(p, 0));
    }

    #[test]
    fn a_reduction_is_waited_for_where_it_is_read() {
        let before = "
            x: boundary f32[4,8]{P:dp}
            %1 = all_reduce<dp>(x) : f32[4,8]
            %2 = fill(dtype=f32, shape=4x8, value=2) : f32[4,8]
            %3 = tanh(%2) : f32[4,8]
            %4 = add(%1, %3) : f32[4,8]
            return y: boundary %4";
        let after = "
            %5 = all_reduce_start<dp>(x) : pending f32[4,8]
            %2 = fill(dtype=f32, shape=4x8, value=2) : f32[4,8]
            %3 = tanh(%2) : f32[4,8]
            %1 = done(%5) : f32[4,8]
            %4 = add(%1, %3) : f32[4,8]";
        check_on("dp=2", before, |p| overlap(p, 8), after);
    }

    #[test]
    fn chains_and_lone_collectives_stay() {
        let text = "
            x: boundary f32[4,8]{P:dp}
            %1 = reduce_scatter<dp>(x, dim=0) : f32[4,8]{0:dp}
            %2 = all_gather<dp>(%1, dim=0) : f32[4,8]
            %3 = tanh(%2) : f32[4,8]
            return y: boundary %3";
        check_unchanged("dp=2", text, |p| overlap(p, 8));
    }

    /// What a block is taken of was itself on its way: it is there when the block starts.
    #[test]
    fn a_started_block_waits_for_the_collective_that_made_it() {
        let before = "
            x: boundary f32[4,8]{P:c 1:r}
            v: param f32[8,4]
            w: boundary f32[4,8]{1:r}
            %1 = all_reduce<c>(x) : f32[4,8]{1:r}
            %2 = broadcast_block<r>(w, dim=1, block=0) : f32[4,4]
            %3 = matmul(%2, v, spec=ay,zy->az, out=f32, add=false) : f32[4,8]
            %4 = broadcast_block<r>(%1, dim=1, block=1) : f32[4,4]
            %5 = add(%2, %4) : f32[4,4]
            return y: boundary %3
            return z: boundary %5";
        let program = crate::testing::read(&format!("mesh r=2 c=2\nprogram p {{\n{before}\n}}\n"));
        phalanx_ir::verify(&overlap(&program, 4)).unwrap();
    }
}
