//! Products that share their first operand become one instruction: `x·q`, `x·k` and `x·v`, `x·gate`
//! and `x·up`, and the gradients of these weights, which all read `x` again.
//!
//! It works on the partitioned program, so shards are packed like whole weights, of any widths.
//! Products are packed if their letters, element type and phase are the same and the sharding rule
//! of the joined instruction accepts their layouts. Two things can prevent packing: one product may
//! need the result of another, directly or through a third pack, and operands that must wait may
//! need more memory. So every pack is tried: it is kept if the program still has a valid order and
//! its peak memory is not higher, after sorting both to free memory early.
//!
//! A pack is placed where its last product was, or earlier if something needs it. That is after the
//! products that compute a cotangent, so a collective of the cotangent still overlaps with the
//! weight gradients.
//!
//! It comes after phases are sliced: a result has the same bits in a pack as alone, so recomputed
//! clones may be packed differently from the originals. Products that share their second operand (a
//! weight that is used twice) are not packed, and neither are those with an addend: sums of
//! products are already chains ([`fold_add`](crate::fold_add())).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use phalanx_ir::ops::{Collective, CollectiveKind, Matmul, PackedMatmul};
use phalanx_ir::{Graph, Instr, Op, Program, Rewriter, TensorType, ValueId};

use crate::{peak_bytes, sort_free};

/// Joins products that share their first operand.
pub fn pack(program: &Program) -> Program {
    let packer = Packer { program, graph: Graph::new(program) };
    let alike = packer.alike();
    if alike.is_empty() {
        return program.clone();
    }
    let limit = peak_bytes(&sort_free(program));
    let mut packs: Vec<Vec<usize>> = Vec::new();
    let mut packed = program.clone();
    for products in alike {
        let first = packs.len();
        for product in products {
            let homes = (first..packs.len()).map(Some).chain([None]);
            for home in homes {
                let mut trial = packs.clone();
                match home {
                    Some(home) => trial[home].push(product),
                    None => trial.push(vec![product]),
                }
                let Some(made) = packer.apply(&trial) else { continue };
                if home.is_none() || peak_bytes(&sort_free(&made)) <= limit {
                    (packs, packed) = (trial, made);
                    break;
                }
            }
        }
    }
    packed
}

struct Packer<'a> {
    program: &'a Program,
    graph: Graph<'a>,
}

impl Packer<'_> {
    /// Groups of several products that differ only in their second operand.
    fn alike(&self) -> Vec<Vec<usize>> {
        let mut found: Vec<(&Instr, Vec<usize>)> = Vec::new();
        for (index, instr) in self.program.instrs().iter().enumerate() {
            if !matches!(instr.op, Op::Matmul(Matmul { add: false, .. })) {
                continue;
            }
            let same = |other: &Instr| {
                (&other.op, other.inputs[0], other.phase, self.step(other))
                    == (&instr.op, instr.inputs[0], instr.phase, self.step(instr))
            };
            match found.iter_mut().find(|(first, _)| same(first)) {
                Some((_, products)) => products.push(index),
                None => found.push((instr, vec![index])),
            }
        }
        found.into_iter().map(|(_, products)| products).filter(|p| p.len() > 1).collect()
    }

    /// Which block of a stream the second operand is: blocks come one after the other, so products of
    /// different ones stay apart.
    fn step(&self, product: &Instr) -> Option<usize> {
        let (_, made) = self.graph.making(product.inputs[1])?;
        match &made.op {
            Op::Collective(Collective {
                kind:
                    CollectiveKind::BroadcastBlock { block, .. }
                    | CollectiveKind::TakeBlock { block, .. },
                ..
            }) => Some(*block),
            _ => None,
        }
    }

    /// The program with these packs, if there is a valid order and their layouts are compatible.
    fn apply(&self, packs: &[Vec<usize>]) -> Option<Program> {
        let order = self.order(packs)?;
        let mut rewriter = Rewriter::new(self.program);
        for members in order {
            match members[..] {
                [index] => rewriter.keep(index),
                _ => self.emit(&members, &mut rewriter)?,
            }
        }
        Some(rewriter.finish())
    }

    /// The instructions in an order that keeps the old one where it can, those of a pack together.
    fn order(&self, packs: &[Vec<usize>]) -> Option<Vec<Vec<usize>>> {
        let instrs = self.program.instrs();
        let mut nodes: Vec<Vec<usize>> = (0..instrs.len()).map(|i| vec![i]).collect();
        // The node that each instruction belongs to: that of its pack's last member.
        let mut node: Vec<usize> = (0..instrs.len()).collect();
        for members in packs {
            let &last = members.iter().max()?;
            for &member in members {
                node[member] = last;
                nodes[member].clear();
            }
            nodes[last].clone_from(members);
        }
        let makers = |members: &[usize]| -> Vec<usize> {
            let operands = members.iter().flat_map(|&i| &instrs[i].inputs);
            operands.filter_map(|&v| self.graph.maker(v)).map(|m| node[m]).collect()
        };
        let mut missing = vec![0; nodes.len()];
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
        for (index, members) in nodes.iter().enumerate() {
            let makers = makers(members);
            missing[index] = makers.len();
            makers.into_iter().for_each(|maker| readers[maker].push(index));
        }
        let mut ready: BinaryHeap<Reverse<usize>> = (0..nodes.len())
            .filter(|&i| missing[i] == 0 && !nodes[i].is_empty())
            .map(Reverse)
            .collect();
        let mut order = Vec::new();
        while let Some(Reverse(next)) = ready.pop() {
            for &reader in &readers[next] {
                missing[reader] -= 1;
                if missing[reader] == 0 {
                    ready.push(Reverse(reader));
                }
            }
            order.push(std::mem::take(&mut nodes[next]));
        }
        nodes.iter().all(Vec::is_empty).then_some(order)
    }

    /// Appends a pack, if its sharding rule accepts the types.
    fn emit(&self, members: &[usize], rewriter: &mut Rewriter<'_>) -> Option<()> {
        let instrs = members.iter().map(|&i| &self.program.instrs()[i]);
        let first = instrs.clone().next()?;
        let Op::Matmul(matmul) = &first.op else { return None };
        let others = instrs.clone().map(|i| i.inputs[1]);
        let joined = Instr {
            op: PackedMatmul { spec: matmul.spec.clone(), out: matmul.out }.into(),
            inputs: [first.inputs[0]].into_iter().chain(others).collect(),
            outputs: instrs.map(|i| i.outputs[0]).collect(),
            phase: first.phase,
        };
        let types = |values: &[ValueId]| -> Vec<&TensorType> {
            values.iter().map(|&v| self.program.ty(v)).collect()
        };
        let (ins, outs) = (types(&joined.inputs), types(&joined.outputs));
        self.program.rule(&joined).check(self.program.mesh(), &ins, &outs).ok()?;
        rewriter.emit(joined.op, &joined.inputs, &joined.outputs, joined.phase);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_on, check_unchanged};

    #[test]
    fn products_of_one_operand_join_whatever_their_widths() {
        check(
            "
            x: boundary f32[4,8]
            q: param f32[8,12]
            k: param f32[8,4]
            v: param f32[8,4]
            %1 = matmul(x, q, spec=ay,yz->az, out=f32, add=false) : f32[4,12]
            %2 = tanh(%1) : f32[4,12]
            %3 = matmul(x, k, spec=ay,yz->az, out=f32, add=false) : f32[4,4]
            %4 = matmul(x, v, spec=ay,yz->az, out=f32, add=false) : f32[4,4]
            return a: boundary %2
            return b: boundary %3
            return c: boundary %4",
            pack,
            "
            %1, %3, %4 = packed_matmul(x, q, k, v, spec=ay,yz->az, out=f32) : f32[4,12], f32[4,4], f32[4,4]
            %2 = tanh(%1) : f32[4,12]",
        );
    }

    #[test]
    fn a_pack_waits_for_all_its_operands_and_stands_behind_what_else_is_ready() {
        check(
            "
            x: residual f32[4,8]
            dq: cotangent f32[4,8]
            dk: cotangent f32[4,8]
            w: param f32[8,8]
            %1 = tanh(dq) : f32[4,8] @B
            %2 = matmul(x, %1, spec=ay,az->yz, out=f32, add=false) : f32[8,8] @W
            %3 = relu(dk) : f32[4,8] @B
            %4 = matmul(%1, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
            %5 = matmul(%3, w, %4, spec=az,yz->ay, out=f32, add=true) : f32[4,8] @B
            %6 = matmul(x, %3, spec=ay,az->yz, out=f32, add=false) : f32[8,8] @W
            %7 = exp(%5) : f32[4,8] @B
            return dx: cotangent %7
            return gq: gradient %2
            return gk: gradient %6",
            pack,
            "
            %1 = tanh(dq) : f32[4,8] @B
            %3 = relu(dk) : f32[4,8] @B
            %4 = matmul(%1, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
            %5 = matmul(%3, w, %4, spec=az,yz->ay, out=f32, add=true) : f32[4,8] @B
            %2, %6 = packed_matmul(x, %1, %3, spec=ay,az->yz, out=f32) : f32[8,8], f32[8,8] @W
            %7 = exp(%5) : f32[4,8] @B",
        );
    }

    #[test]
    fn other_letters_types_phases_and_addends_stay_apart() {
        let text = "
            x: boundary f32[8,8]
            w: param f32[8,8]
            %1 = matmul(x, w, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %2 = matmul(x, w, spec=ay,zy->az, out=f32, add=false) : f32[8,8]
            %3 = matmul(x, w, spec=ay,yz->az, out=bf16, add=false) : bf16[8,8]
            %4 = matmul(x, w, spec=ay,yz->az, out=f32, add=false) : f32[8,8] @B
            %5 = matmul(x, w, %1, spec=ay,yz->az, out=f32, add=true) : f32[8,8]
            %6 = matmul(w, x, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            return a: boundary %2
            return b: boundary %3
            return c: cotangent %4
            return d: boundary %5
            return e: boundary %6";
        check_unchanged("", text, pack);
    }

    /// The third product needs the first, so it can't join it; neither can two packs need each
    /// other. The large value makes sure that memory is not the reason.
    #[test]
    fn products_that_need_each_other_stay_apart() {
        check(
            "
            x: boundary f32[8,8]
            u: param f32[8,8]
            v: param f32[8,8]
            z: boundary f32[64,64]
            %0 = tanh(z) : f32[64,64]
            %1 = matmul(x, u, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %2 = matmul(x, v, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %3 = matmul(x, %1, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            return a: probe %2
            return b: probe %3
            return c: gradient %0",
            pack,
            "
            %0 = tanh(z) : f32[64,64]
            %1, %2 = packed_matmul(x, u, v, spec=ay,yz->az, out=f32) : f32[8,8], f32[8,8]
            %3 = matmul(x, %1, spec=ay,yz->az, out=f32, add=false) : f32[8,8]",
        );
        check(
            "
            x: boundary f32[8,8]
            y: boundary f32[8,8]
            u: param f32[8,8]
            z: boundary f32[64,64]
            %0 = tanh(z) : f32[64,64]
            %1 = matmul(x, u, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %2 = matmul(y, %1, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %3 = matmul(y, u, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %4 = matmul(x, %3, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            return a: probe %2
            return b: probe %4
            return c: gradient %0",
            pack,
            "
            %0 = tanh(z) : f32[64,64]
            %3 = matmul(y, u, spec=ay,yz->az, out=f32, add=false) : f32[8,8]
            %1, %4 = packed_matmul(x, u, %3, spec=ay,yz->az, out=f32) : f32[8,8], f32[8,8]
            %2 = matmul(y, %1, spec=ay,yz->az, out=f32, add=false) : f32[8,8]",
        );
    }

    /// Together, the two wide products would live at once.
    #[test]
    fn a_pack_that_needs_more_memory_is_not_formed() {
        let text = "
            x: boundary f32[4,8]
            u: param f32[8,64]
            v: param f32[8,64]
            %1 = matmul(x, u, spec=ay,yz->az, out=f32, add=false) : f32[4,64]
            %2 = sum(%1, dims=1, out=f32) : f32[4]
            %3 = matmul(x, v, spec=ay,yz->az, out=f32, add=false) : f32[4,64]
            %4 = sum(%3, dims=1, out=f32) : f32[4]
            return a: boundary %2
            return b: boundary %4";
        check_unchanged("", text, pack);
    }

    #[test]
    fn shards_of_different_layouts_join_unless_their_partial_sums_differ() {
        check_on(
            "dp=2 tp=2",
            "
            x: boundary f32[4,8]{0:dp}
            q: param f32[8,12]{1:tp}
            k: param f32[8,4]
            v: param f32[8,4]{1:tp}
            %1 = matmul(x, q, spec=ay,yz->az, out=f32, add=false) : f32[4,12]{0:dp 1:tp}
            %2 = matmul(x, k, spec=ay,yz->az, out=f32, add=false) : f32[4,4]{0:dp}
            %3 = matmul(x, v, spec=ay,yz->az, out=f32, add=false) : f32[4,4]{0:dp 1:tp}
            return a: boundary %1
            return b: boundary %2
            return c: boundary %3",
            pack,
            "
            %1, %2, %3 = packed_matmul(x, q, k, v, spec=ay,yz->az, out=f32) : f32[4,12]{0:dp 1:tp}, f32[4,4]{0:dp}, f32[4,4]{0:dp 1:tp}",
        );
        let text = "
            x: boundary f32[4,8]
            q: boundary f32[8,4]{P:tp}
            k: boundary f32[8,4]
            %1 = matmul(x, q, spec=ay,yz->az, out=f32, add=false) : f32[4,4]{P:tp}
            %2 = matmul(x, k, spec=ay,yz->az, out=f32, add=false) : f32[4,4]
            return a: probe %1
            return b: probe %2";
        check_unchanged("tp=2", text, pack);
    }
}
