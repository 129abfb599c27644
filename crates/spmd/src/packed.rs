//! Which values hold rows in front of their regions and zeros behind them, and where the number of rows is.
//!
//! Found from the ops alone: a dispatch and a product of packed rows say so, and whatever is linear in such values
//! and treats each row by itself keeps it. Zeros need not travel, so where such a value changes its layout, only its
//! rows do.

use phalanx_autodiff::Joint;
use phalanx_ir::rule::{Dim, FactorKind, Rule};
use phalanx_ir::{Instr, Op, Program, ValueId};

/// Regions of rows that a value holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Packed {
    /// How many rows the runs of each region have, `i32[…, runs]`.
    pub(crate) counts: usize,
    /// The dims of the value that count regions, in the order of the counts, and the one that counts rows.
    dims: Vec<usize>,
}

impl Packed {
    /// Whether the dims lie as counts have them, with one more behind them: `[…, rows, width]`.
    pub(crate) fn is_in_order(&self, dims: usize) -> bool {
        self.dims.len() + 1 == dims && self.dims.iter().enumerate().all(|(at, dim)| at == *dim)
    }

    /// How many dims count regions.
    pub(crate) fn regions(&self) -> usize {
        self.dims.len() - 1
    }
}

/// For each value of a joint graph its regions, if it is zero behind their rows.
pub(crate) fn of(joint: &Joint, rules: impl Fn(usize) -> Rule) -> Vec<Option<Packed>> {
    let program = &joint.program;
    let mut all: Vec<Option<Packed>> = vec![None; program.values().len()];
    for (number, instr) in program.instrs().iter().enumerate() {
        let made = match instr.op {
            Op::Dispatch(_) => vec![counted(program, instr, instr.inputs[1])],
            Op::GroupedMatmul(_) => vec![whole(program, instr.outputs[0], instr.inputs[2])],
            _ if instr.inputs.iter().all(|value| all[value.index()].is_none()) => continue,
            _ => kept(&rules(number), instr, &all),
        };
        for (value, packed) in instr.outputs.iter().zip(made) {
            all[value.index()] = packed;
        }
    }
    all
}

/// The regions of dispatched rows, if what gave them their slots counts them.
fn counted(program: &Program, dispatch: &Instr, slot: ValueId) -> Option<Packed> {
    let maker = program.instrs().iter().find(|instr| instr.outputs.first() == Some(&slot))?;
    let Op::Queue(queue) = &maker.op else { return None };
    let shape = &program.ty(dispatch.outputs[0]).shape;
    let same = shape[0] == queue.parts && shape[shape.len() - 2] == queue.room;
    same.then(|| whole(program, dispatch.outputs[0], maker.outputs[1])).flatten()
}

/// Rows with all dims in the order of their counts.
fn whole(program: &Program, rows: ValueId, counts: ValueId) -> Option<Packed> {
    let (shape, of) = (&program.ty(rows).shape, &program.ty(counts).shape);
    let regions = of.len() - 1;
    let fits = shape.len() == regions + 2 && shape[..regions] == of[..regions];
    fits.then(|| Packed { counts: counts.index(), dims: (0..=regions).collect() })
}

/// What an op makes of packed operands: linear in a set of them, it keeps zeros where all of them have some, if it
/// treats every row and region by itself.
fn kept(rule: &Rule, instr: &Instr, all: &[Option<Packed>]) -> Vec<Option<Packed>> {
    let moved = |operand: usize, result: &[Dim]| {
        let packed = all[instr.inputs[operand].index()].as_ref()?;
        let dims = packed.dims.iter().map(|&dim| {
            let own = &rule.inputs[operand][dim];
            let [factor] = own[..] else { return None };
            let alone = rule.factors[factor].kind == FactorKind::Free;
            result.iter().position(|dim| dim == own).filter(|_| alone)
        });
        Some(Packed { counts: packed.counts, dims: dims.collect::<Option<_>>()? })
    };
    let result = |(number, dims): (usize, &Vec<Dim>)| {
        let added =
            rule.addends.iter().filter(|(_, to)| *to == number).map(|(operand, _)| *operand);
        let added: Vec<usize> = added.collect();
        rule.linear.iter().find_map(|group| {
            let mut operands = group.iter().chain(&added).map(|&operand| moved(operand, dims));
            let first = operands.next()??;
            operands.all(|other| other.as_ref() == Some(&first)).then_some(first)
        })
    };
    rule.outputs.iter().enumerate().map(result).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use phalanx_ir::text;

    use super::*;

    /// The names of the values that are found to be packed.
    fn found(lines: &str) -> Vec<String> {
        let text = format!("mesh\nprogram p {{\n{lines}\n}}\n");
        let program = text::parse(&text).unwrap();
        let origins = vec![None; program.instrs().len()];
        let joint = Joint { program, origins };
        let program = &joint.program;
        let packed = of(&joint, |number| program.rule(&program.instrs()[number]));
        let name = |at: usize| text::value_name(program, ValueId(at as u32));
        let is = |(at, packed): (usize, &Option<Packed>)| packed.as_ref().map(|_| name(at));
        packed.iter().enumerate().filter_map(is).collect()
    }

    #[test]
    fn zeros_stay_where_rows_are_treated_alone() {
        let lines = "x: data f32[2,1,6,8]
            index: data i32[2,1,6,2]
            w: param f32[4,8,8]
            b: param f32[8]
            %1, %2 = queue(index, experts=4, parts=2, room=12) : i32[2,1,6,2], i32[2,2,1,2]
            %3 = dispatch(x, %1, experts=2, capacity=12) : f32[2,2,1,12,8]
            %4 = grouped_matmul(%3, w, %2, transposed=false) : f32[2,2,1,12,8]
            %5 = silu(%4) : f32[2,2,1,12,8]
            %6 = mul(%5, %4) : f32[2,2,1,12,8]
            %7 = add(%6, %3) : f32[2,2,1,12,8]
            %8 = add(%7, b) : f32[2,2,1,12,8]
            %9 = mul(%8, %5) : f32[2,2,1,12,8]
            %10 = transpose(%7, perm=1x0x2x3x4) : f32[2,2,1,12,8]
            %11 = combine(%7, %1) : f32[2,1,6,8]
            return a: probe %9
            return b: probe %10
            return c: probe %11";
        // Values are numbered from the inputs on. Where an op is not linear, adds something else, or mixes rows, nothing is known
        // of what it makes.
        assert_eq!(found(lines), ["%6", "%7", "%9", "%10", "%13"]);
    }
}
