//! How one instruction runs: for each axis one choice, a factor, a linear group, or nothing.

use crate::mask::{Axes, Grid, MaskLayout, State};
use crate::net::Node;
use phalanx_ir::rule::FactorKind;

/// What one axis does to one instruction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Choice {
    /// Every rank along the axis does the same.
    Replicated,
    /// The axis shards this factor.
    Factor(usize),
    /// The operands of this linear group are partial sums, and so is the result.
    Partial(usize),
}

/// The choices of all axes: the ordered axes of each factor, and the linear group of each axis that
/// passes as a partial sum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NodeChoices {
    pub(crate) factors: Vec<Axes>,
    pub(crate) groups: Vec<Option<usize>>,
}

impl NodeChoices {
    pub(crate) fn replicated(node: &Node, grid: &Grid) -> Self {
        Self {
            factors: vec![Axes::default(); node.rule.factors.len()],
            groups: vec![None; grid.len()],
        }
    }

    /// Adds an axis at the minor end of its factor.
    pub(crate) fn put(&mut self, axis: usize, choice: Choice) {
        match choice {
            Choice::Replicated => {}
            Choice::Factor(f) => self.factors[f] = self.factors[f].with(axis),
            Choice::Partial(group) => self.groups[axis] = Some(group),
        }
    }

    /// The layout that an operand must have.
    pub(crate) fn operand(&self, node: &Node, operand: usize) -> MaskLayout {
        if node.rule.added_to(operand).is_some() {
            return self.result(node, 0);
        }
        let in_group = |g: &usize| node.rule.linear[*g].contains(&operand);
        let partial = (self.groups.iter().enumerate())
            .filter(|(_, g)| g.as_ref().is_some_and(in_group))
            .fold(0, |set, (axis, _)| set | 1 << axis);
        MaskLayout { dims: self.dims(&node.rule.inputs[operand]), partial }
    }

    /// The layout that a result has.
    pub(crate) fn result(&self, node: &Node, result: usize) -> MaskLayout {
        let mut partial = 0;
        for (axis, group) in self.groups.iter().enumerate() {
            partial |= u16::from(group.is_some()) << axis;
        }
        for (factor, axes) in self.factors.iter().enumerate() {
            if node.contracts(factor, result) {
                partial |= axes.set();
            }
        }
        MaskLayout { dims: self.dims(&node.rule.outputs[result]), partial }
    }

    fn dims(&self, dims: &[Vec<usize>]) -> Vec<Axes> {
        let join =
            |d: &Vec<usize>| d.iter().fold(Axes::default(), |axes, &f| axes.join(self.factors[f]));
        dims.iter().map(join).collect()
    }

    /// Among how many ranks a factor is divided.
    pub(crate) fn shares_of(&self, grid: &Grid, factor: usize) -> usize {
        grid.count(self.factors[factor])
    }

    /// Whether one more axis fits on a factor: its shards divide the extent, and every factor that
    /// is major to it in some dim is fully sharded, since the axes of a dim fill the major factor
    /// first.
    pub(crate) fn fits(&self, node: &Node, grid: &Grid, factor: usize, axis: usize) -> bool {
        let axes = self.factors[factor].with(axis);
        let (shards, of) = (grid.parts(axes), &node.rule.factors[factor]);
        if of.kind == FactorKind::Whole || !node.extents[factor].is_multiple_of(shards) {
            return false;
        }
        let apart = grid.deals(axes) && (of.in_blocks || node.is_compound(factor));
        if apart || node.extents[factor] / shards < node.least[factor] {
            return false;
        }
        let exhausted = |&f: &usize| grid.count(self.factors[f]) == node.extents[f];
        let dims = node.rule.inputs.iter().chain(&node.rule.outputs).flatten();
        dims.filter_map(|d| d.iter().position(|&f| f == factor).map(|at| &d[..at]))
            .all(|major| major.iter().all(exhausted))
    }

    /// Every choice that is legal for one more axis.
    pub(crate) fn options(&self, node: &Node, grid: &Grid, axis: usize) -> Vec<Choice> {
        let factors = (0..node.rule.factors.len())
            .filter(|&f| node.rule.factors[f].size > 1 && self.fits(node, grid, f, axis));
        let groups = (0..node.rule.linear.len()).map(Choice::Partial);
        [Choice::Replicated].into_iter().chain(factors.map(Choice::Factor)).chain(groups).collect()
    }
}

/// What an operand must be over an axis, for a choice.
pub(crate) fn operand_state(node: &Node, choice: Choice, operand: usize) -> State {
    if node.rule.added_to(operand).is_some() {
        return result_state(node, choice, 0);
    }
    match choice {
        Choice::Replicated => State::Replicated,
        Choice::Factor(f) => sharded(&node.rule.inputs[operand], f).unwrap_or(State::Replicated),
        Choice::Partial(g) if node.rule.linear[g].contains(&operand) => State::Partial,
        Choice::Partial(_) => State::Replicated,
    }
}

/// What a result is over an axis, for a choice.
pub(crate) fn result_state(node: &Node, choice: Choice, result: usize) -> State {
    match choice {
        Choice::Replicated => State::Replicated,
        Choice::Partial(_) => State::Partial,
        Choice::Factor(f) => sharded(&node.rule.outputs[result], f).unwrap_or({
            if node.contracts(f, result) { State::Partial } else { State::Replicated }
        }),
    }
}

/// The state of the cotangent that an instruction gives for an operand: a partial sum if the
/// operand lacks the factor, since every rank of the axis used the whole operand for its part of
/// the work.
pub(crate) fn cotangent_state(node: &Node, choice: Choice, operand: usize) -> State {
    match choice {
        Choice::Replicated => State::Replicated,
        Choice::Factor(f) => sharded(&node.rule.inputs[operand], f).unwrap_or(State::Partial),
        Choice::Partial(g) if node.rule.linear[g].contains(&operand) => State::Replicated,
        Choice::Partial(_) => State::Partial,
    }
}

fn sharded(dims: &[Vec<usize>], factor: usize) -> Option<State> {
    dims.iter().position(|d| d.contains(&factor)).map(State::Sharded)
}
