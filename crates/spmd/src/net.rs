//! The joint graph as the partitioner sees it: rules, edges and sizes, by index.

use phalanx_autodiff::Joint;
use phalanx_ir::rule::{FactorKind, Rule};
use phalanx_ir::{DType, Op, OpDef, Phase, Role};

/// An instruction.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) rule: Rule,
    pub(crate) ins: Vec<usize>,
    pub(crate) outs: Vec<usize>,
    pub(crate) phase: Phase,
    /// The forward instruction whose gradient this is part of.
    pub(crate) origin: Option<usize>,
    pub(crate) op: Op,
    /// Whether its result is its operand with another shape.
    pub(crate) is_view: bool,
    /// The padded extent of each factor.
    pub(crate) extents: Vec<usize>,
    /// How many elements of each factor a rank must have at least: windows reach into the blocks of both
    /// neighbours, and no further.
    pub(crate) least: Vec<usize>,
}

/// A value.
#[derive(Debug)]
pub(crate) struct Value {
    pub(crate) padded: Vec<usize>,
    pub(crate) dtype: DType,
    /// The instruction that computes it, and which of its results it is.
    pub(crate) maker: Option<(usize, usize)>,
    /// The instructions that read it, with the operand's index.
    pub(crate) users: Vec<(usize, usize)>,
    /// Whether it is a parameter.
    pub(crate) is_param: bool,
    /// Whether it depends only on parameters and constants.
    pub(crate) of_params: bool,
}

impl Value {
    /// Bytes of the whole value, padding included.
    pub(crate) fn bytes(&self) -> f64 {
        self.padded.iter().product::<usize>() as f64 * self.dtype.size() as f64
    }
}

/// The joint graph.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) nodes: Vec<Node>,
    pub(crate) values: Vec<Value>,
}

impl Net {
    /// `padded` gives the padded extents of every value.
    pub(crate) fn new(joint: &Joint, rules: Vec<Rule>, padded: Vec<Vec<usize>>) -> Self {
        let program = &joint.program;
        let mut values: Vec<Value> = (program.values().iter().zip(padded))
            .map(|(ty, padded)| Value {
                padded,
                dtype: ty.dtype,
                maker: None,
                users: Vec::new(),
                is_param: false,
                of_params: false,
            })
            .collect();
        for port in program.inputs_with(Role::Param) {
            let value = &mut values[port.value.index()];
            (value.is_param, value.of_params) = (true, true);
        }
        let mut nodes = Vec::with_capacity(rules.len());
        for (index, (instr, rule)) in program.instrs().iter().zip(rules).enumerate() {
            let ins: Vec<usize> = instr.inputs.iter().map(|v| v.index()).collect();
            let outs: Vec<usize> = instr.outputs.iter().map(|v| v.index()).collect();
            let of_params = ins.iter().all(|&v| values[v].of_params);
            for (result, &v) in outs.iter().enumerate() {
                values[v].maker = Some((index, result));
                values[v].of_params = of_params;
            }
            for (operand, &v) in ins.iter().enumerate() {
                values[v].users.push((index, operand));
            }
            let extents = extents(&rule, &values, &ins, &outs);
            let least = least(&rule, &instr.op);
            nodes.push(Node {
                ins,
                outs,
                phase: instr.phase,
                origin: joint.origins[index],
                op: instr.op.clone(),
                is_view: instr.op.is_view(),
                extents,
                least,
                rule,
            });
        }
        Self { nodes, values }
    }
}

/// The padded extent of each factor, from the dims that have it.
fn extents(rule: &Rule, values: &[Value], ins: &[usize], outs: &[usize]) -> Vec<usize> {
    let mut extents: Vec<usize> = rule.factors.iter().map(|f| f.size).collect();
    let sides = rule.inputs.iter().zip(ins).chain(rule.outputs.iter().zip(outs));
    for (dims, &value) in sides {
        for (factors, &padded) in dims.iter().zip(&values[value].padded) {
            let Some(at) = carrier(rule, factors) else { continue };
            let minor: usize = factors[at + 1..].iter().map(|&f| rule.factors[f].size).product();
            extents[factors[at]] = extents[factors[at]].max(padded / minor.max(1));
        }
    }
    extents
}

fn least(rule: &Rule, op: &Op) -> Vec<usize> {
    let mut least = vec![1; rule.factors.len()];
    for reach in op.reaches() {
        let factors = &rule.inputs[reach.operand][reach.dim];
        let Some(at) = carrier(rule, factors) else { continue };
        let minor: usize = factors[at + 1..].iter().map(|&f| rule.factors[f].size).product();
        let needed = reach.before.max(reach.after).div_ceil(minor.max(1));
        least[factors[at]] = least[factors[at]].max(needed);
    }
    least
}

/// The factor of a dim that its padding belongs to: the first with more than one element.
pub(crate) fn carrier(rule: &Rule, factors: &[usize]) -> Option<usize> {
    let first = factors.iter().position(|&f| rule.factors[f].size != 1);
    first.or((!factors.is_empty()).then_some(0))
}

impl Node {
    /// Whether a factor is summed over in a result: sharding it makes the result partial.
    pub(crate) fn contracts(&self, factor: usize, result: usize) -> bool {
        self.rule.factors[factor].kind == FactorKind::Free
            && !self.rule.outputs[result].iter().any(|d| d.contains(&factor))
    }

    /// Whether some dim has a factor beside others.
    pub(crate) fn is_compound(&self, factor: usize) -> bool {
        let dims = self.rule.inputs.iter().chain(&self.rule.outputs).flatten();
        let several = |dim: &Vec<usize>| dim.iter().filter(|&&f| self.extents[f] != 1).count() > 1;
        dims.into_iter().any(|dim| dim.contains(&factor) && several(dim))
    }

    /// Whether an operand has a factor.
    pub(crate) fn reads(&self, operand: usize, factor: usize) -> bool {
        self.rule.inputs[operand].iter().any(|d| d.contains(&factor))
    }

    /// Whether an operand does not affect layouts: a scalar of the step, a random key.
    pub(crate) fn neutral(&self, operand: usize) -> bool {
        let whole = |&f: &usize| {
            self.rule.factors[f].kind == FactorKind::Whole || self.rule.factors[f].size == 1
        };
        self.rule.inputs[operand].iter().flatten().all(whole)
    }
}
