//! Random legal layouts of one instruction: each mesh axis on a factor, on a linear group as a
//! partial sum, or on nothing.

use std::collections::BTreeSet;

use phalanx_ir::layout::Sharding;
use phalanx_ir::ops::Shaped;
use phalanx_ir::rule::{Dim, FactorKind};
use phalanx_ir::{
    Axis, Form, Layout, Mesh, Op, OpDef, Order, Phase, Program, Role, TensorType, ValueId, verify,
};

use crate::cases::Dice;

/// A mesh of up to three axes and eight ranks.
pub fn random_mesh(dice: &mut Dice) -> Mesh {
    let mut sizes: Vec<usize> = Vec::new();
    for _ in 0..1 + dice.below(3) {
        let left = 8 / sizes.iter().product::<usize>();
        let fitting: Vec<usize> = [1, 2, 2, 2, 3, 4].into_iter().filter(|&n| n <= left).collect();
        sizes.push(dice.pick(&fitting));
    }
    Mesh::new(["a", "b", "c"].into_iter().zip(sizes)).unwrap()
}

/// An operand of an instruction: its type without the layout, and its role.
pub type Operand = (Shaped, Form, Role);

/// A program of one instruction whose operands and results have random legal layouts, or `None` if
/// the drawn layouts are not legal.
pub fn random_program(
    op: &Op,
    operands: &[Operand],
    mesh: &Mesh,
    dice: &mut Dice,
) -> Option<Program> {
    let plain: Vec<TensorType> = (operands.iter())
        .map(|((dtype, shape), form, _)| {
            let mut ty = TensorType::new(*dtype, shape.clone());
            ty.form = *form;
            ty
        })
        .collect();
    let results = op.infer(&plain.iter().collect::<Vec<_>>()).unwrap();
    let choice = Choice::random(op, operands, &results, mesh, dice)?;
    let mut program = Program::new(format!("{} on {mesh}", op.name()), mesh.clone());
    let inputs = (operands.iter().enumerate())
        .map(|(i, (shaped, form, role))| {
            let ty = choice.operand(i, shaped, *form)?;
            Some(program.input(format!("in{i}"), *role, ty))
        })
        .collect::<Option<Vec<ValueId>>>()?;
    let types = (results.iter().enumerate())
        .map(|(i, shaped)| {
            let form = operands.first().filter(|_| op.gives_units()).map_or(Form::Tensor, |o| o.1);
            choice.result(i, shaped, form)
        })
        .collect::<Option<Vec<TensorType>>>()?;
    let outputs = program.push_unchecked(op.clone(), &inputs, types, Phase::F);
    for (i, value) in outputs.into_iter().enumerate() {
        let float = program.ty(value).dtype.is_float();
        let role = if float && op.accumulates(i) { Role::Gradient } else { Role::Probe };
        program.output(format!("out{i}"), role, value);
    }
    verify(&program).ok().map(|()| program)
}

/// What was drawn for each factor and each group.
struct Choice {
    rule: phalanx_ir::Rule,
    shardings: Vec<Sharding>,
    extents: Vec<usize>,
    /// For each operand: the axes over which it is partial.
    partial: Vec<BTreeSet<Axis>>,
}

impl Choice {
    fn random(
        op: &Op,
        operands: &[Operand],
        results: &[Shaped],
        mesh: &Mesh,
        dice: &mut Dice,
    ) -> Option<Self> {
        let ins: Vec<&[usize]> = operands.iter().map(|((_, s), _, _)| s.as_slice()).collect();
        let outs: Vec<&[usize]> = results.iter().map(|(_, s)| s.as_slice()).collect();
        let rule = op.rule(&ins, &outs);
        let mut shardings = vec![Sharding::default(); rule.factors.len()];
        let mut partial = vec![BTreeSet::new(); operands.len()];
        let free: Vec<usize> = (0..rule.factors.len())
            // Of a part that is here a rank alone knows nothing that one rank would: that is tested
            // where all parts come together.
            .filter(|&f| !matches!(rule.factors[f].kind, FactorKind::Whole | FactorKind::Here))
            .collect();
        let mut axes: Vec<Axis> = mesh.axes().map(|(axis, _)| axis).collect();
        // Axes are assigned in random order, so they are on a dim in any order.
        axes.sort_by_key(|_| dice.below(1000));
        for axis in axes {
            match dice.below(10) {
                0 | 1 => {}
                2 | 3 if !rule.linear.is_empty() => {
                    let group = dice.below(rule.linear.len());
                    rule.linear[group].iter().for_each(|&i| partial[i].extend([axis]));
                }
                _ if free.is_empty() => {}
                _ => shardings[dice.pick(&free)].axes.push(axis),
            }
        }
        let padded = dice.percent(70);
        let extents = (rule.factors.iter().zip(&mut shardings))
            .map(|(factor, sharding)| {
                let mut blocks = mesh.count(&sharding.axes);
                if blocks > 1 && dice.percent(15) {
                    sharding.order = dice.pick(&[Order::Striped, Order::Zigzag]);
                    blocks *= if sharding.order == Order::Zigzag { 2 } else { 1 };
                }
                let enough = factor.size.next_multiple_of(blocks);
                let head = factor.name == "d" && op.name().starts_with("atten");
                let more = padded && !head && factor.name != "key" && dice.percent(30);
                enough + if more { blocks } else { 0 }
            })
            .collect();
        Some(Self { rule, shardings, extents, partial })
    }

    fn operand(&self, i: usize, shaped: &Shaped, form: Form) -> Option<TensorType> {
        if let Some(result) = self.rule.added_to(i) {
            return self.result(result, shaped, form);
        }
        self.ty(&self.rule.inputs[i], shaped, form, self.partial[i].clone())
    }

    fn result(&self, i: usize, shaped: &Shaped, form: Form) -> Option<TensorType> {
        let dims = &self.rule.outputs[i];
        let has = |factor: usize| dims.iter().any(|d| d.contains(&factor));
        let summed = (0..self.rule.factors.len())
            .filter(|&f| self.rule.factors[f].kind == FactorKind::Free && !has(f));
        let mut partial: BTreeSet<Axis> = self.partial.iter().flatten().copied().collect();
        partial.extend(summed.flat_map(|f| self.shardings[f].axes.iter().copied()));
        self.ty(dims, shaped, form, partial)
    }

    fn ty(
        &self,
        dims: &[Dim],
        (dtype, shape): &Shaped,
        form: Form,
        partial: BTreeSet<Axis>,
    ) -> Option<TensorType> {
        let shardings = (dims.iter())
            .map(|factors| {
                let carriers =
                    || factors.iter().map(|&f| &self.shardings[f]).filter(|s| !s.axes.is_empty());
                Sharding {
                    axes: carriers().flat_map(|s| s.axes.iter().copied()).collect(),
                    order: carriers().next().map_or(Order::Block, |s| s.order),
                    turn: 0,
                }
            })
            .collect();
        let padded = dims.iter().map(|d| d.iter().map(|&f| self.extents[f]).product()).collect();
        let mut ty = TensorType::new(*dtype, shape.clone()).with_padded(padded).ok()?;
        (ty.form, ty.layout) = (form, Layout::new(shardings, partial).ok()?);
        Some(ty)
    }
}
