//! Which elementwise steps the instruction before them computes too: a bias or a residual that a product
//! adds before it rounds, and a residual that is added to the gradient of a norm.
//!
//! It depends on the program alone, so that the planner knows which values are never stored. A product
//! of bf16 then rounds once instead of after each addition, in every program alike.

use std::collections::HashMap;

use phalanx_ir::ops::{Binary, BinaryKind, FusedArg, FusedStep, ReduceKind, Unary, UnaryKind};
use phalanx_ir::{Graph, Instr, Op, Program, ValueId};

use crate::kernels::is_narrow;

/// What an instruction adds to one of its results.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fold {
    /// One number for each column.
    pub(crate) bias: Option<ValueId>,
    /// A value of the result's shape.
    pub(crate) addend: Option<ValueId>,
    /// The instruction that adds, and the last of the steps that are folded.
    maker: usize,
    last: usize,
    /// The value that is stored instead of the result, if the last step is a result of its instruction.
    pub(crate) into: Option<ValueId>,
    /// The step that is the GELU of the sum, and its result.
    pub(crate) gelu: Option<(usize, ValueId)>,
}

/// The folds of a program, by the value that is folded into.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folds {
    by_value: HashMap<ValueId, Fold>,
    /// By the result of an elementwise instruction: the sum over its rows, which is computed with it.
    sums: HashMap<ValueId, ValueId>,
}

impl Folds {
    pub(crate) fn of(program: &Program) -> Self {
        let graph = Graph::new(program);
        let mut by_value = HashMap::new();
        for (index, instr) in program.instrs().iter().enumerate() {
            let results = match &instr.op {
                Op::Matmul(_) | Op::PackedMatmul(_) => &instr.outputs[..],
                Op::RmsNormGrad(_) | Op::LayerNormGrad(_) => &instr.outputs[..1],
                _ => continue,
            };
            for &value in results {
                let search = Search { program, graph: &graph, index, instr, value };
                by_value.extend(search.fold().map(|fold| (value, fold)));
            }
        }
        let values = program.instrs().iter().filter_map(|instr| column_sum(program, &graph, instr));
        Self { by_value, sums: values.collect() }
    }

    /// The sum over the rows of an elementwise instruction's result, if the instruction computes it too,
    /// with the number of the result.
    pub(crate) fn sum_of(&self, instr: &Instr) -> Option<(usize, ValueId)> {
        let outputs = instr.outputs.iter().enumerate();
        outputs.into_iter().find_map(|(i, value)| Some((i, *self.sums.get(value)?)))
    }

    /// Whether a sum is computed with what it sums.
    pub(crate) fn is_summed(&self, sum: ValueId) -> bool {
        self.sums.values().any(|value| *value == sum)
    }

    /// What is added to a value.
    pub(crate) fn to(&self, value: ValueId) -> Option<&Fold> {
        self.by_value.get(&value)
    }

    /// Values that are never stored, with those that are stored instead.
    pub(crate) fn merged(&self) -> Vec<(ValueId, ValueId)> {
        let pair = |(&value, fold): (&ValueId, &Fold)| Some((value, fold.into?));
        let mut pairs: Vec<_> = self.by_value.iter().filter_map(pair).collect();
        pairs.sort_unstable();
        pairs
    }

    /// Values that are written with a product, and the number of its instruction.
    pub(crate) fn early(&self) -> Vec<(ValueId, usize)> {
        let pair = |fold: &Fold| fold.gelu.map(|(_, value)| (value, fold.maker));
        let mut pairs: Vec<_> = self.by_value.values().filter_map(pair).collect();
        pairs.sort_unstable();
        pairs
    }

    /// The steps of an elementwise instruction that are left, over the same operands, and which of its
    /// results they compute.
    pub(crate) fn remaining(&self, instr: &Instr, steps: Vec<FusedStep>) -> Remaining {
        let results: Vec<usize> = results_of(instr);
        let mut replaced: HashMap<usize, FusedArg> = HashMap::new();
        for (i, value) in instr.inputs.iter().enumerate() {
            let Some(fold) = self.to(*value) else { continue };
            for step in 0..=fold.last {
                if is_inside(&steps, step, fold.last, i) {
                    replaced.insert(step, FusedArg::Input(i));
                }
            }
            // Nothing in the group reads it.
            replaced.extend(fold.gelu.map(|(step, _)| (step, FusedArg::Input(i))));
        }
        let mut place = HashMap::new();
        let mut left = Vec::new();
        for (index, step) in steps.into_iter().enumerate() {
            if replaced.contains_key(&index) {
                continue;
            }
            let moved = |arg: &FusedArg| match arg {
                FusedArg::Step(s) => {
                    replaced.get(s).copied().unwrap_or_else(|| FusedArg::Step(place[s]))
                }
                input => *input,
            };
            let args = step.args.iter().map(moved).collect();
            place.insert(index, left.len());
            left.push(FusedStep { args, ..step });
        }
        let kept = results.iter().enumerate().filter(|(_, step)| !replaced.contains_key(step));
        let results = kept.map(|(result, step)| (result, place[step])).collect();
        Remaining { steps: left, results }
    }
}

/// What a reduction sums, if that is the only result of an elementwise instruction that nothing else is
/// folded into, and the sum of its columns is a gradient: gradients have memory of their own from the
/// start.
fn column_sum(program: &Program, graph: &Graph<'_>, instr: &Instr) -> Option<(ValueId, ValueId)> {
    let Op::Reduce(reduce) = &instr.op else { return None };
    let (x, sum) = (instr.inputs[0], instr.outputs[0]);
    let (_, made) = graph.making(x)?;
    let ty = program.ty(x);
    let (mesh, mut outputs) = (program.mesh(), program.outputs().iter());
    let leading = (0..ty.shape.len() - 1).collect::<Vec<_>>();
    let gradient = outputs.any(|port| port.value == sum && port.role == phalanx_ir::Role::Gradient);
    let again = program.outputs().iter().filter(|port| port.value == sum).count() > 1;
    let width = ty.local_shape(mesh).last().copied().unwrap_or(0);
    // Parameters and gradients may lie at any element of a unit; all else is aligned.
    let param = |value: &ValueId| {
        let mut inputs = program.inputs().iter();
        inputs.any(|port| port.value == *value && port.role == phalanx_ir::Role::Param)
    };
    let fits = reduce.kind == ReduceKind::Sum
        && !made.inputs.iter().any(param)
        && !graph.returned(x)
        && reduce.dims == leading
        && matches!(made.op, Op::UnaryGrad(_))
        && is_narrow(ty.dtype)
        && width % 8 == 0
        && ty.padded() == &ty.shape[..]
        && gradient
        && !again
        && graph.readers(sum).is_empty();
    fits.then_some((x, sum))
}

/// What is left of an elementwise instruction.
pub(crate) struct Remaining {
    pub(crate) steps: Vec<FusedStep>,
    /// The number of a result, and the step that computes it.
    pub(crate) results: Vec<(usize, usize)>,
}

/// Whether a step lies on the way from an operand to the last folded step.
fn is_inside(steps: &[FusedStep], step: usize, last: usize, operand: usize) -> bool {
    let reads = |from: usize, to: usize| steps[to].args.contains(&FusedArg::Step(from));
    let first = |s: usize| steps[s].args.contains(&FusedArg::Input(operand));
    let begins = first(step) || (0..step).any(|s| first(s) && reads(s, step));
    let ends = step == last || reads(step, last);
    begins && ends
}

/// The steps of an elementwise instruction, and those that are results.
pub(crate) fn steps_of(program: &Program, instr: &Instr) -> Option<Vec<FusedStep>> {
    match &instr.op {
        Op::Fused(fused) => Some(fused.steps.clone()),
        single if phalanx_ir::ops::Fused::accepts(single) => {
            let args = (0..instr.inputs.len()).map(FusedArg::Input).collect();
            let dtype = program.ty(instr.outputs[0]).dtype;
            Some(vec![FusedStep { op: single.clone(), args, dtype }])
        }
        _ => None,
    }
}

fn results_of(instr: &Instr) -> Vec<usize> {
    match &instr.op {
        Op::Fused(fused) => fused.results.clone(),
        _ => vec![0],
    }
}

/// The search for what is added to one result of an instruction.
struct Search<'a> {
    program: &'a Program,
    graph: &'a Graph<'a>,
    index: usize,
    instr: &'a Instr,
    value: ValueId,
}

impl Search<'_> {
    fn fold(&self) -> Option<Fold> {
        let ty = self.program.ty(self.value);
        let is_product = matches!(self.instr.op, Op::Matmul(_) | Op::PackedMatmul(_));
        let &[reader] = self.graph.readers(self.value) else { return None };
        if self.graph.returned(self.value) || (is_product && !is_narrow(ty.dtype)) {
            return None;
        }
        let reading = &self.program.instrs()[reader];
        let (steps, results) = (steps_of(self.program, reading)?, results_of(reading));
        let operand = reading.inputs.iter().position(|v| *v == self.value)?;
        let has_addend = matches!(&self.instr.op, Op::Matmul(m) if m.add);
        let mut fold =
            Fold { bias: None, addend: None, maker: self.index, last: 0, into: None, gelu: None };
        let mut at = FusedArg::Input(operand);
        // One step that adds, and only that one, reads what was computed so far.
        while let Some((step, other)) = self.adding(&steps, at, reading) {
            let is_bias = is_product && fold.bias.is_none() && self.is_columns(other);
            let is_addend = !has_addend && fold.addend.is_none() && self.is_addend(other);
            match (is_bias, is_addend) {
                (true, _) => fold.bias = Some(other),
                (_, true) => fold.addend = Some(other),
                _ => break,
            }
            fold.last = step;
            at = FusedArg::Step(step);
            if results.contains(&step) {
                break;
            }
        }
        if fold.bias.is_none() && fold.addend.is_none() {
            return None;
        }
        let result = results.iter().position(|step| *step == fold.last);
        fold.into = result.map(|result| reading.outputs[result]);
        fold.gelu = self.gelu(&fold, &steps, reading, &results);
        // A sum that is added to its output cannot take two addends.
        let taken = fold.addend.is_some() && is_product;
        (!(taken && fold.into.is_some_and(|into| self.is_added_to(into)))).then_some(fold)
    }

    /// The GELU of a product with a bias, if it is stored and no step of the group reads it.
    fn gelu(
        &self,
        fold: &Fold,
        steps: &[FusedStep],
        reading: &Instr,
        results: &[usize],
    ) -> Option<(usize, ValueId)> {
        fold.bias.filter(|_| fold.addend.is_none())?;
        let has_addend = matches!(&self.instr.op, Op::Matmul(m) if m.add);
        let is_gelu = |step: &FusedStep| {
            matches!(step.op, Op::Unary(Unary { kind: UnaryKind::Gelu }))
                && step.args[..] == [FusedArg::Step(fold.last)]
        };
        let step = steps.iter().position(is_gelu).filter(|_| !has_addend)?;
        let inside = steps.iter().any(|other| other.args.contains(&FusedArg::Step(step)));
        let result = results.iter().position(|of| *of == step).filter(|_| !inside)?;
        let value = reading.outputs[result];
        (!self.is_added_to(value)).then_some((step, value))
    }

    /// The step that alone reads a value, if it adds another value from outside to it.
    fn adding(
        &self,
        steps: &[FusedStep],
        at: FusedArg,
        reading: &Instr,
    ) -> Option<(usize, ValueId)> {
        let mut readers = steps.iter().enumerate().filter(|(_, step)| step.args.contains(&at));
        let (Some((index, step)), None) = (readers.next(), readers.next()) else { return None };
        let adds = matches!(step.op, Op::Binary(Binary { kind: BinaryKind::Add }));
        let same = step.dtype == self.program.ty(self.value).dtype;
        let other = match step.args[..] {
            [left, right] if left == at && right != at => right,
            [left, right] if right == at && left != at => left,
            _ => return None,
        };
        match other {
            FusedArg::Input(i) if adds && same => Some((index, reading.inputs[i])),
            _ => None,
        }
    }

    /// Whether a value exists before the instruction and has the element type of its result.
    fn exists(&self, other: ValueId) -> bool {
        self.graph.maker(other).is_none_or(|maker| maker < self.index)
            && self.program.ty(other).dtype == self.program.ty(self.value).dtype
    }

    fn is_columns(&self, other: ValueId) -> bool {
        let (ty, mesh) = (self.program.ty(other), self.program.mesh());
        let shape = self.program.ty(self.value).local_shape(mesh);
        self.exists(other)
            && shape.len() > 1
            && ty.local_shape(mesh)[..] == shape[shape.len() - 1..]
    }

    fn is_addend(&self, other: ValueId) -> bool {
        let mesh = self.program.mesh();
        let shape = |v: ValueId| self.program.ty(v).local_shape(mesh);
        self.exists(other) && shape(other) == shape(self.value)
    }

    fn is_added_to(&self, value: ValueId) -> bool {
        use phalanx_ir::Role::{Cotangent, Gradient};
        let outputs = self.program.outputs().iter().filter(|port| port.value == value);
        outputs.into_iter().any(|port| matches!(port.role, Gradient | Cotangent))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use phalanx_ir::{Builder, DType};
    use phalanx_passes::fuse;

    /// What is folded, by the names of operands: result, bias, addend.
    fn folded(program: &Program) -> Vec<(bool, bool, bool)> {
        let folds = Folds::of(program);
        let values = program.instrs().iter().flat_map(|instr| &instr.outputs);
        let facts = |f: &Fold| (f.bias.is_some(), f.addend.is_some(), f.into.is_some());
        values.filter_map(|value| folds.to(*value)).map(facts).collect()
    }

    #[test]
    fn a_linear_layer_adds_its_bias_and_the_residual() {
        let b = Builder::new("t", DType::Bf16);
        let h = b.boundary("h", [2, 4, 8]);
        let x = h.matmul(b.param("w", [8, 8])) + b.param("bias", [8]);
        b.output("y", h + x);
        let program = fuse(&b.finish().unwrap());
        assert_eq!(folded(&program), [(true, true, true)]);
        let group = program.instrs().last().unwrap();
        let steps = steps_of(&program, group).unwrap();
        let left = Folds::of(&program).remaining(group, steps);
        assert!(left.steps.is_empty() && left.results.is_empty());
    }

    #[test]
    fn what_follows_a_bias_reads_the_sum() {
        let b = Builder::new("t", DType::Bf16);
        let h = b.boundary("h", [4, 8]);
        let u = h.matmul(b.param("w", [8, 8])) + b.param("bias", [8]);
        b.output("u", u);
        b.output("y", u.silu());
        let program = fuse(&b.finish().unwrap());
        assert_eq!(folded(&program), [(true, false, true)]);
        let group = program.instrs().last().unwrap();
        let left = Folds::of(&program).remaining(group, steps_of(&program, group).unwrap());
        assert_eq!(left.steps.len(), 1);
        assert!(matches!(left.steps[0].args[..], [FusedArg::Input(0)]));
        assert_eq!(left.results, [(1, 0)]);
    }

    #[test]
    fn a_gelu_is_computed_with_the_product() {
        let b = Builder::new("t", DType::Bf16);
        let h = b.boundary("h", [4, 8]);
        let u = h.matmul(b.param("w", [8, 8])) + b.param("bias", [8]);
        b.output("u", u);
        b.output("y", u.gelu());
        let program = fuse(&b.finish().unwrap());
        let group = program.instrs().last().unwrap();
        let left = Folds::of(&program).remaining(group, steps_of(&program, group).unwrap());
        assert!(left.steps.is_empty() && left.results.is_empty());
    }

    #[test]
    fn products_that_others_read_and_products_of_f32_stay() {
        for (dtype, read) in [(DType::F32, false), (DType::Bf16, true)] {
            let b = Builder::new("t", dtype);
            let h = b.boundary("h", [4, 8]);
            let x = h.matmul(b.param("w", [8, 8]));
            b.output("y", x + b.param("bias", [8]));
            if read {
                b.output("x", x);
            }
            assert_eq!(folded(&b.finish().unwrap()), []);
        }
    }
}
