//! Fuses elementwise instructions into groups, so that intermediate values are never stored.
//!
//! It works greedily, in program order. A group is *open* until an instruction outside reads one of
//! its results; while it is open, it can grow, and it is executed at the place of its last member.
//! When it is closed, its place is fixed. So all readers of a group's results come after its place.
//!
//! An instruction joins every open group of its kind (one shape, layout and phase) that it is
//! related to: it reads a result of the group, or an operand of the full shape that the group reads
//! too. Unrelated groups are not merged, because that would save no memory traffic and only keep
//! values alive. An instruction that joins none may still move up into a closed group, if all its
//! operands exist there and it is the last reader of some result of the group, which then need not
//! be stored: so the two halves of a gated unit's gradient are fused although the products of one
//! half are between them. Partial sums are not fused.

use phalanx_ir::ops::{Fused, FusedArg, FusedStep};
use phalanx_ir::{Graph, Instr, Program, Rewriter, ValueId};

use crate::dead_code;

/// The most operands of a group that have the full shape: the streams a kernel reads at once.
pub const MAX_FULL_OPERANDS: usize = 4;
/// The most operands of a group, including repeated ones.
pub const MAX_OPERANDS: usize = 8;
/// The most instructions in a group.
pub const MAX_STEPS: usize = 12;

/// Joins elementwise instructions into [`Fused`] ones. Dead code is removed first, since a result
/// without readers would look like an intermediate value of its group.
pub fn fuse(program: &Program) -> Program {
    let program = &dead_code(program);
    let fuser = Fuser { program, graph: Graph::new(program) };
    let mut rewriter = Rewriter::new(program);
    let mut at: Vec<Option<Group>> = (program.instrs().iter()).map(|_| None).collect();
    let mut grouped = vec![false; at.len()];
    for group in fuser.groups().into_iter().filter(|g| g.members.len() > 1) {
        for &member in &group.members {
            grouped[member] = true;
        }
        let place = group.place;
        at[place] = Some(group);
    }
    for (index, group) in at.iter().enumerate() {
        match group {
            Some(group) => fuser.emit(&group.members, &mut rewriter),
            None if grouped[index] => {}
            None => rewriter.keep(index),
        }
    }
    rewriter.finish()
}

/// Instructions that run together.
struct Group {
    /// Their indices, ascending.
    members: Vec<usize>,
    /// The index of the one where all are executed.
    place: usize,
}

struct Fuser<'a> {
    program: &'a Program,
    graph: Graph<'a>,
}

impl Fuser<'_> {
    /// Every elementwise instruction in exactly one group.
    fn groups(&self) -> Vec<Group> {
        let (mut open, mut closed): (Vec<Group>, Vec<Group>) = (Vec::new(), Vec::new());
        for (index, instr) in self.program.instrs().iter().enumerate() {
            // Groups whose results it reads come first, because that saves a store; then the
            // latest, whose values are still in the cache.
            let (read, other): (Vec<Group>, Vec<Group>) =
                (open.into_iter()).partition(|group| self.reads(instr, &group.members));
            let mut joined = self.accepts(instr).then(|| vec![index]);
            let mut still_open = Vec::new();
            for (groups, rest) in [(read, &mut closed), (other, &mut still_open)] {
                for group in groups.into_iter().rev() {
                    let own = joined.as_ref();
                    match own.and_then(|own| self.union(own, &group.members, instr)) {
                        Some(union) => joined = Some(union),
                        None => rest.push(group),
                    }
                }
            }
            still_open.reverse();
            if let Some(members) = joined
                && !(members.len() == 1 && self.go_up(index, &mut closed))
            {
                still_open.push(Group { members, place: index });
            }
            open = still_open;
        }
        closed.extend(open);
        closed
    }

    /// Moves an instruction into a closed group if that saves a store.
    fn go_up(&self, index: usize, closed: &mut [Group]) -> bool {
        let instr = &self.program.instrs()[index];
        let found = (0..closed.len()).rev().find_map(|i| {
            let Group { members, place } = &closed[i];
            let spares = |&v: &ValueId| {
                (self.graph.maker(v)).is_some_and(|m| members.contains(&m))
                    && !self.leaves(v, &[&members[..], &[index]].concat())
            };
            let exists = |&v: &ValueId| match self.graph.maker(v) {
                Some(maker) if !members.contains(&maker) => {
                    (closed.iter().find(|g| g.members.contains(&maker))).map_or(maker, |g| g.place)
                        < *place
                }
                _ => true,
            };
            let fits = instr.inputs.iter().any(spares) && instr.inputs.iter().all(exists);
            let union = self.union(&[index], members, instr).filter(|_| fits)?;
            Some((i, union))
        });
        match found {
            Some((i, union)) => {
                closed[i].members = union;
                true
            }
            None => false,
        }
    }

    fn accepts(&self, instr: &Instr) -> bool {
        let whole = |v: &ValueId| self.program.ty(*v).layout.partial().is_empty();
        Fused::accepts(&instr.op) && instr.inputs.iter().chain(&instr.outputs).all(whole)
    }

    /// The group with `own` added, if `instr` (the newest of `own`) is related to it and a kernel
    /// can take both.
    fn union(&self, own: &[usize], group: &[usize], instr: &Instr) -> Option<Vec<usize>> {
        let first = &self.program.instrs()[group[0]];
        let (ty, other) = (self.program.ty(instr.outputs[0]), self.program.ty(first.outputs[0]));
        let alike = ty.shape == other.shape
            && ty.layout == other.layout
            && ty.form == other.form
            && instr.phase == first.phase;
        if !alike || !(self.reads(instr, group) || self.shares(instr, group)) {
            return None;
        }
        let mut union = [group, own].concat();
        union.sort_unstable();
        let (full, repeated) = self.operands(&union);
        let fits = union.len() <= MAX_STEPS
            && full.len() <= MAX_FULL_OPERANDS
            && full.len() + repeated.len() <= MAX_OPERANDS;
        fits.then_some(union)
    }

    fn reads(&self, instr: &Instr, group: &[usize]) -> bool {
        (instr.inputs.iter())
            .filter_map(|&v| self.graph.maker(v))
            .any(|maker| group.contains(&maker))
    }

    fn shares(&self, instr: &Instr, group: &[usize]) -> bool {
        let (full, _) = self.operands(group);
        instr.inputs.iter().any(|v| full.contains(v))
    }

    /// The values that a group reads from outside, each once, in order of first use: those of the
    /// full shape, and those with fewer dims.
    fn operands(&self, group: &[usize]) -> (Vec<ValueId>, Vec<ValueId>) {
        let instrs = self.program.instrs();
        let shape = &self.program.ty(instrs[group[0]].outputs[0]).shape;
        let (mut full, mut repeated) = (Vec::new(), Vec::new());
        for &value in group.iter().flat_map(|&i| &instrs[i].inputs) {
            let inside = (self.graph.maker(value)).is_some_and(|m| group.contains(&m));
            let list = match self.program.ty(value).shape == *shape {
                true => &mut full,
                false => &mut repeated,
            };
            if !inside && !list.contains(&value) {
                list.push(value);
            }
        }
        (full, repeated)
    }

    /// Operands of the full shape go first: the first result may use their memory. The oldest
    /// member reads one at least, as its first operand has its result's shape.
    fn emit(&self, group: &[usize], rewriter: &mut Rewriter<'_>) {
        let instrs = self.program.instrs();
        let (full, repeated) = self.operands(group);
        let operands = [full, repeated].concat();
        let place = |value: ValueId| {
            let step = (self.graph.maker(value)).and_then(|m| group.iter().position(|&i| i == m));
            match step {
                Some(step) => FusedArg::Step(step),
                None => FusedArg::Input(operands.iter().position(|&v| v == value).unwrap_or(0)),
            }
        };
        let steps = (group.iter().map(|&i| &instrs[i]))
            .map(|instr| FusedStep {
                op: instr.op.clone(),
                args: instr.inputs.iter().map(|&v| place(v)).collect(),
                dtype: self.program.ty(instr.outputs[0]).dtype,
            })
            .collect();
        let results: Vec<usize> = (0..group.len())
            .filter(|&step| self.leaves(instrs[group[step]].outputs[0], group))
            .collect();
        let values: Vec<ValueId> =
            (results.iter()).map(|&step| instrs[group[step]].outputs[0]).collect();
        let op = Fused { steps, results, full: 0 };
        rewriter.emit(op, &operands, &values, instrs[group[0]].phase);
    }

    fn leaves(&self, value: ValueId, group: &[usize]) -> bool {
        let outside = |reader: &usize| !group.contains(reader);
        self.graph.returned(value) || self.graph.readers(value).iter().any(outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_unchanged};

    #[test]
    fn swiglu_joins_across_the_product_between() {
        check(
            "
            g: boundary f32[4,8]
            h: boundary f32[4,8]
            bias: param f32[8]
            w: param f32[8,8]
            %1 = silu(g) : f32[4,8]
            %2 = matmul(h, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %3 = mul(%1, %2) : f32[4,8]
            %4 = add(%3, bias) : f32[4,8]
            %5 = matmul(%4, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %6 = relu(%5) : f32[4,8]
            return y: boundary %6",
            fuse,
            "
            %2 = matmul(h, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %4 = fused(g, %2, bias, body=silu(i0)/f32;mul(s0|i1)/f32;add(s1|i2)/f32, results=2, full=0) : f32[4,8]
            %5 = matmul(%4, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %6 = relu(%5) : f32[4,8]",
        );
    }

    #[test]
    fn a_result_that_others_read_is_stored_and_closes_the_group() {
        check(
            "
            x: boundary bf16[4,8]
            %1 = cast(x, to=f32) : f32[4,8]
            %2 = scale(%1, by=-0.5) : f32[4,8]
            %3 = sum(%2, dims=1, out=f32) : f32[4]
            %4 = tanh(%2) : f32[4,8]
            %5 = mul(%4, %1) : f32[4,8]
            return y: boundary %5
            return s: probe %3",
            fuse,
            "
            %1, %2 = fused(x, body=cast(i0|to:f32)/f32;scale(s0|by:-0.5)/f32, results=0x1, full=0) : f32[4,8], f32[4,8]
            %3 = sum(%2, dims=1, out=f32) : f32[4]
            %5 = fused(%2, %1, body=tanh(i0)/f32;mul(s0|i1)/f32, results=1, full=0) : f32[4,8]",
        );
    }

    #[test]
    fn the_gradient_of_a_gated_unit_is_one_group_around_the_products_between() {
        check(
            "
            dy: cotangent f32[4,8]
            a: residual f32[4,8]
            b: residual f32[4,8]
            s: residual f32[4,8]
            w: param f32[8,8]
            %1 = mul(dy, b) : f32[4,8] @B
            %2 = mul(dy, s) : f32[4,8] @B
            %3 = matmul(%2, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
            %4 = silu_grad(a, %1) : f32[4,8] @B
            %5 = relu_grad(%3, %2) : f32[4,8] @B
            return da: cotangent %4
            return db: cotangent %5",
            fuse,
            "
            %2, %4 = fused(dy, b, s, a, body=mul(i0|i1)/f32;mul(i0|i2)/f32;silu_grad(i3|s0)/f32, results=1x2, full=0) : f32[4,8], f32[4,8] @B
            %3 = matmul(%2, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8] @B
            %5 = relu_grad(%3, %2) : f32[4,8] @B",
        );
    }

    #[test]
    fn siblings_that_share_a_full_operand_join_and_strangers_do_not() {
        check(
            "
            dy: cotangent f32[4,8]
            a: residual f32[4,8]
            b: residual f32[4,8]
            z: residual f32[4,8]
            %1 = mul(dy, a) : f32[4,8] @B
            %2 = relu(z) : f32[4,8] @B
            %3 = mul(dy, b) : f32[4,8] @B
            %4 = scale(%3, by=2) : f32[4,8] @W
            return da: cotangent %1
            return db: cotangent %3
            return dz: cotangent %2
            return g: gradient %4",
            fuse,
            "
            %2 = relu(z) : f32[4,8] @B
            %1, %3 = fused(dy, a, b, body=mul(i0|i1)/f32;mul(i0|i2)/f32, results=0x1, full=0) : f32[4,8], f32[4,8] @B
            %4 = scale(%3, by=2) : f32[4,8] @W",
        );
    }

    #[test]
    fn an_instruction_joins_the_groups_it_brings_together() {
        check(
            "
            a: boundary f32[8]
            b: boundary f32[8]
            %1 = relu(a) : f32[8]
            %2 = tanh(b) : f32[8]
            %3 = ge(%1, %2) : bool[8]
            %4 = select(%3, %1, %2) : f32[8]
            return y: boundary %4",
            fuse,
            "
            %4 = fused(a, b, body=relu(i0)/f32;tanh(i1)/f32;ge(s0|s1)/bool;select(s2|s0|s1)/f32, results=3, full=0) : f32[8]",
        );
    }

    #[test]
    fn partial_sums_are_left_alone() {
        let text = "
            x: boundary f32[8]{P:tp}
            %1 = scale(x, by=2) : f32[8]{P:tp}
            %2 = scale(%1, by=3) : f32[8]{P:tp}
            %3 = all_reduce<tp>(%2) : f32[8]
            return y: boundary %3";
        check_unchanged("tp=2", text, fuse);
    }

    #[test]
    fn groups_stay_within_what_a_kernel_takes() {
        let mut lines = String::from("x: boundary f32[8]\n%0 = relu(x) : f32[8]\n");
        for i in 1..MAX_STEPS + 3 {
            lines += &format!("%{i} = relu(%{}) : f32[8]\n", i - 1);
        }
        lines += &format!("return y: boundary %{}", MAX_STEPS + 2);
        let result = fuse(&crate::testing::read(&format!("mesh \nprogram p {{\n{lines}\n}}")));
        assert_eq!(sizes(&result), [MAX_STEPS, 3]);

        let mut lines = String::new();
        for i in 0..7 {
            lines += &format!("x{i}: boundary f32[8]\n");
        }
        lines += "%0 = add(x0, x1) : f32[8]\n";
        for i in 1..6 {
            lines += &format!("%{i} = add(%{}, x{}) : f32[8]\n", i - 1, i + 1);
        }
        lines += "return y: boundary %5";
        let result = fuse(&crate::testing::read(&format!("mesh \nprogram p {{\n{lines}\n}}")));
        assert_eq!(sizes(&result), [3, 3]);
    }

    fn sizes(program: &Program) -> Vec<usize> {
        let steps = |i: &Instr| match &i.op {
            phalanx_ir::Op::Fused(fused) => fused.steps.len(),
            _ => 1,
        };
        program.instrs().iter().map(steps).collect()
    }
}
