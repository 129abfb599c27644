//! Orders a straight-line program so that memory is freed early; used for the unsplit backward.
//!
//! Greedy list scheduling: of the instructions whose operands exist, the next is the one that frees
//! most bytes beyond what it allocates; ties keep the old order. Looking one step ahead is a
//! heuristic, so the old order stays unless the new one has a lower peak of live bytes.
//!
//! Only values whose live range depends on the program count: results, and those inputs (residuals,
//! cotangents, boundary values) that it is the last to read. Parameters, state, batches and scalars
//! outlive it, and gradients and state go to buffers that exist anyway, so none of them counts.
//! Bytes are those of one rank. Sharing in place and scratch memory are not considered.

use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Graph, Op, Program, Rewriter, Role, ValueId};

/// Reorders independent instructions to lower the peak of live bytes. Programs with started
/// collectives are not changed: the places of starts and dones were chosen for overlap.
pub fn sort_free(program: &Program) -> Program {
    if program.values().iter().any(|ty| ty.pending) {
        return program.clone();
    }
    let ledger = Ledger::new(program);
    let order = ledger.greedy();
    if ledger.peak(order.iter().copied()) >= peak_bytes(program) {
        return program.clone();
    }
    let mut rewriter = Rewriter::new(program);
    order.into_iter().for_each(|index| rewriter.keep(index));
    rewriter.finish()
}

/// The most bytes that are live at once on one rank, by the same count.
pub fn peak_bytes(program: &Program) -> usize {
    Ledger::new(program).peak(0..program.instrs().len())
}

/// The bytes of each value and what keeps it alive.
struct Ledger<'a> {
    program: &'a Program,
    graph: Graph<'a>,
    /// Bytes, by value; 0 for what does not count.
    bytes: Vec<usize>,
}

/// The state of a simulated execution.
struct State {
    /// Instructions that still have to read each value.
    readers: Vec<usize>,
    live: usize,
}

impl<'a> Ledger<'a> {
    fn new(program: &'a Program) -> Self {
        let mut bytes: Vec<usize> =
            (program.values().iter()).map(|ty| ty.local_bytes(program.mesh())).collect();
        for port in program.inputs() {
            if !matches!(port.role, Role::Residual | Role::Cotangent | Role::Boundary) {
                bytes[port.value.index()] = 0;
            }
        }
        for port in program.outputs() {
            if matches!(port.role, Role::Gradient | Role::State) {
                bytes[port.value.index()] = 0;
            }
        }
        Self { program, graph: Graph::new(program), bytes }
    }

    fn start(&self) -> State {
        let inputs = self.program.inputs().iter();
        State {
            readers: (0..self.bytes.len())
                .map(|v| self.graph.readers(ValueId(v as u32)).len())
                .collect(),
            live: inputs.map(|p| self.bytes[p.value.index()]).sum(),
        }
    }

    fn allocates(&self, index: usize) -> usize {
        let results = &self.program.instrs()[index].outputs;
        results.iter().map(|v| self.bytes[v.index()]).sum()
    }

    /// Bytes that this instruction reads last, and those of its results that nothing reads.
    fn frees(&self, state: &State, index: usize) -> usize {
        let instr = &self.program.instrs()[index];
        let operands = (instr.inputs.iter().enumerate())
            .filter(|&(i, v)| !instr.inputs[..i].contains(v) && state.readers[v.index()] == 1)
            .map(|(_, v)| v);
        let unread = (instr.outputs.iter()).filter(|v| state.readers[v.index()] == 0);
        operands
            .chain(unread)
            .filter(|&&v| !self.graph.returned(v))
            .map(|v| self.bytes[v.index()])
            .sum()
    }

    /// Executes an instruction and returns the bytes live while it runs.
    fn step(&self, state: &mut State, index: usize) -> usize {
        let during = state.live + self.allocates(index);
        state.live = during - self.frees(state, index);
        let inputs = &self.program.instrs()[index].inputs;
        for (i, value) in inputs.iter().enumerate() {
            if !inputs[..i].contains(value) {
                state.readers[value.index()] -= 1;
            }
        }
        during
    }

    fn peak(&self, order: impl Iterator<Item = usize>) -> usize {
        let mut state = self.start();
        let first = state.live;
        order.map(|index| self.step(&mut state, index)).fold(first, usize::max)
    }

    fn greedy(&self) -> Vec<usize> {
        let instrs = self.program.instrs();
        let mut state = self.start();
        let mut missing: Vec<usize> = (instrs.iter())
            .map(|i| (i.inputs.iter()).filter(|&&v| self.graph.maker(v).is_some()).count())
            .collect();
        let after = after_steps(self.program);
        for &waits in after.iter().flatten() {
            missing[waits] += 1;
        }
        let mut ready: Vec<usize> = (0..instrs.len()).filter(|&i| missing[i] == 0).collect();
        let mut order = Vec::with_capacity(instrs.len());
        let gain = |state: &State, index: usize| {
            self.frees(state, index) as i64 - self.allocates(index) as i64
        };
        while let Some(next) =
            (0..ready.len()).max_by_key(|&i| (gain(&state, ready[i]), std::cmp::Reverse(ready[i])))
        {
            let index = ready.swap_remove(next);
            self.step(&mut state, index);
            order.push(index);
            for &waits in &after[index] {
                missing[waits] -= 1;
                if missing[waits] == 0 {
                    ready.push(waits);
                }
            }
            for &value in &instrs[index].outputs {
                for &reader in self.graph.readers(value) {
                    let uses = instrs[reader].inputs.iter().filter(|&&v| v == value);
                    missing[reader] -= uses.count();
                    if missing[reader] == 0 {
                        ready.push(reader);
                    }
                }
            }
        }
        order
    }
}

/// For each instruction, the broadcasts of blocks that wait for it: those of a step come after what was
/// computed before it, or all blocks would be there at once.
fn after_steps(program: &Program) -> Vec<Vec<usize>> {
    let mut after = vec![Vec::new(); program.instrs().len()];
    let mut computed = None;
    for (index, instr) in program.instrs().iter().enumerate() {
        match &instr.op {
            Op::Collective(c) if matches!(c.kind, CollectiveKind::BroadcastBlock { .. }) => {
                if let Some(before) = computed {
                    let waiting: &mut Vec<usize> = &mut after[before];
                    waiting.push(index);
                }
            }
            Op::Collective(_) => {}
            _ => computed = Some(index),
        }
    }
    after
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_unchanged, read};

    /// Three layers whose weight gradients all come last, so every cotangent lives to the end.
    const LATE: &str = "
        dy: cotangent f32[4,8]
        x1: residual f32[4,8]
        x2: residual f32[4,8]
        w: param f32[8,8]
        %1 = matmul(dy, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
        %2 = matmul(%1, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
        %3 = matmul(x1, dy, spec=ay,az->yz, out=f32, add=false) : f32[8,8] @W
        %4 = matmul(x2, %1, spec=ay,az->yz, out=f32, add=false) : f32[8,8] @W
        return dx: cotangent %2
        return g1: gradient %3
        return g2: gradient %4";

    #[test]
    fn gradients_that_free_their_operands_come_early() {
        check(
            LATE,
            sort_free,
            "
            %3 = matmul(x1, dy, spec=ay,az->yz, out=f32, add=false) : f32[8,8] @W
            %1 = matmul(dy, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
            %4 = matmul(x2, %1, spec=ay,az->yz, out=f32, add=false) : f32[8,8] @W
            %2 = matmul(%1, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B",
        );
    }

    #[test]
    fn the_peak_is_what_counting_by_hand_gives() {
        let tensor = 4 * 8 * 4;
        let late = read(&format!("mesh \nprogram p {{{LATE}\n}}"));
        // dy, x1 and x2 with both cotangents, against never more than the three that it starts with.
        assert_eq!(peak_bytes(&late), 5 * tensor);
        assert_eq!(peak_bytes(&sort_free(&late)), 3 * tensor);
    }

    #[test]
    fn an_order_that_is_as_good_stays() {
        let text = "
            x: boundary f32[8]
            %1 = relu(x) : f32[8]
            %2 = tanh(x) : f32[8]
            %3 = add(%1, %2) : f32[8]
            return y: boundary %3";
        check_unchanged("", text, sort_free);
    }

    #[test]
    fn bytes_are_those_of_one_rank() {
        let text = "
            x: boundary f32[8]{0:dp}
            %1 = relu(x) : f32[8]{0:dp}
            return y: boundary %1";
        check_unchanged("dp=4", text, sort_free);
        let program = read(&format!("mesh dp=4\nprogram p {{{text}\n}}"));
        assert_eq!(peak_bytes(&program), 2 * 2 * 4);
    }
}
