//! Propagation: what annotations decide about instructions, and instructions about each other.
//!
//! One axis at a time, forward instructions only. In topological order each takes what its operands
//! agree on: a shard beats replication, a partial sum takes the layout of a decided partner, and
//! weights beat activations where factors disagree. Then the layout of one known operand passes
//! through instructions whose other operands are unknown, and the wishes of readers go backwards.
//! What is left is open, to be chosen by cost. Backward instructions then inherit from their
//! forward op by factor; sums of cotangents are decided like forward instructions.

use phalanx_ir::Phase;
use phalanx_ir::rule::FactorKind;

use crate::error::SpmdError;
use crate::mask::State;
use crate::node_choices::{Choice, operand_state};
use crate::plan::{Known, Plan};

/// What the neighbours of an instruction imply for an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// This choice.
    Take(Choice),
    /// No information, so replicated; but a reader that wants a shard has priority.
    Weak,
    /// Some operands are not decided.
    Wait,
    /// Several choices; the cost decides.
    Open,
}

/// The operands' states, sorted.
#[derive(Default)]
struct OperandStates {
    /// Sharded factors, with their operands, and whether one of these is a parameter.
    shards: Vec<(usize, Vec<usize>, bool)>,
    partial: Vec<usize>,
    replicated: Vec<usize>,
    unknown: usize,
    open: usize,
}

impl Plan<'_> {
    /// Decides what follows from annotations on one axis for forward instructions; whether
    /// everything was decided.
    pub(crate) fn propagate(&mut self, axis: usize) -> Result<bool, SpmdError> {
        loop {
            self.sweep(axis)?;
            let next = match self.propagate_known(axis)? {
                None => self.backwards(axis)?,
                found => found,
            };
            let next = match next {
                None => self.first_weak(axis)?.map(|node| (node, Choice::Replicated)),
                found => found,
            };
            let Some((node, choice)) = next else { break };
            self.put(node, axis, choice);
        }
        Ok(self.undecided(axis).next().is_none())
    }

    /// Decides the backward on one axis, once the forward is.
    pub(crate) fn propagate_backward(&mut self, axis: usize) -> Result<(), SpmdError> {
        for node in 0..self.net.nodes.len() {
            if self.choices[node][axis].is_some() {
                continue;
            }
            let choice = match self.net.nodes[node].origin {
                Some(origin) => self.inherited(node, origin, axis),
                None => match self.verdict(node, axis, false)? {
                    Verdict::Take(choice) => choice,
                    Verdict::Open => self.cheapest(node, axis),
                    Verdict::Weak | Verdict::Wait => Choice::Replicated,
                },
            };
            self.put(node, axis, choice);
        }
        Ok(())
    }

    /// Forward instructions for which an axis is not decided.
    pub(crate) fn undecided(&self, axis: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.net.nodes.len()).filter(move |&n| {
            self.net.nodes[n].phase == Phase::F && self.choices[n][axis].is_none()
        })
    }

    /// Takes what operands agree on, in topological order.
    fn sweep(&mut self, axis: usize) -> Result<(), SpmdError> {
        let nodes: Vec<usize> = self.undecided(axis).collect();
        for node in nodes {
            if let Verdict::Take(choice) = self.verdict(node, axis, false)? {
                self.put(node, axis, choice);
            }
        }
        Ok(())
    }

    /// The first instruction that follows its known operands, although others are unknown.
    fn propagate_known(&self, axis: usize) -> Result<Option<(usize, Choice)>, SpmdError> {
        for node in self.undecided(axis) {
            if let Verdict::Take(choice) = self.verdict(node, axis, true)? {
                return Ok(Some((node, choice)));
            }
        }
        Ok(None)
    }

    fn first_weak(&self, axis: usize) -> Result<Option<usize>, SpmdError> {
        for node in self.undecided(axis) {
            if self.verdict(node, axis, false)? == Verdict::Weak {
                return Ok(Some(node));
            }
        }
        Ok(None)
    }

    /// The last instruction whose readers want a shard that it could make.
    fn backwards(&self, axis: usize) -> Result<Option<(usize, Choice)>, SpmdError> {
        for node in self.undecided(axis).rev() {
            if let Some(factor) = self.wanted(node, axis)? {
                return Ok(Some((node, Choice::Factor(factor))));
            }
        }
        Ok(None)
    }

    /// The factor that a parameter on a contraction, or a decided reader, wants sharded.
    fn wanted(&self, node: usize, axis: usize) -> Result<Option<usize>, SpmdError> {
        let n = &self.net.nodes[node];
        for (operand, &value) in n.ins.iter().enumerate() {
            match self.state(value, axis) {
                // With a memory limit, open parameters are chosen by cost instead.
                Known::Open if self.price > 0.0 => return Ok(None),
                Known::Is(State::Sharded(dim)) => {
                    let dims = &n.rule.inputs[operand][dim];
                    let factor = self.factor(node, dims, value, dim, axis)?;
                    let is_param = self.net.values[value].of_params;
                    return Ok(factor.filter(|&f| is_param && n.contracts(f, 0)));
                }
                Known::Is(State::Partial) if !self.adds(node) => return Ok(None),
                _ => {}
            }
        }
        for (result, &value) in n.outs.iter().enumerate() {
            // An annotated value is a boundary: its readers do not affect the instruction that
            // computes it.
            if self.pins.read[value].as_ref().is_some_and(|p| p.closed >> axis & 1 == 1) {
                continue;
            }
            for &(reader, operand) in &self.net.values[value].users {
                let Some(choice) = self.choices[reader][axis] else { continue };
                let State::Sharded(dim) = operand_state(&self.net.nodes[reader], choice, operand)
                else {
                    continue;
                };
                let dims = &n.rule.outputs[result][dim];
                let factor = self.factor(node, dims, value, dim, axis)?;
                let free = |&f: &usize| {
                    n.rule.factors[f].kind == FactorKind::Free
                        && self.node_choices[node].fits(n, self.grid, f, axis)
                };
                let movable = n.ins.is_empty()
                    || n.ins.iter().any(|&v| match self.state(v, axis) {
                        Known::Not | Known::Open | Known::Is(State::Partial) => true,
                        Known::Is(_) => false,
                    });
                if let (Some(factor), true) = (factor.filter(free), movable) {
                    return Ok(Some(factor));
                }
            }
        }
        Ok(None)
    }

    /// Whether an instruction is linear in all its operands together.
    fn adds(&self, node: usize) -> bool {
        let n = &self.net.nodes[node];
        let all: Vec<usize> = (0..n.ins.len()).filter(|&i| !n.neutral(i)).collect();
        n.rule.linear.contains(&all)
    }

    fn votes(&self, node: usize, axis: usize) -> Result<OperandStates, SpmdError> {
        let n = &self.net.nodes[node];
        let mut votes = OperandStates::default();
        for (operand, &value) in n.ins.iter().enumerate() {
            if n.neutral(operand) && self.state(value, axis) != Known::Is(State::Partial) {
                continue;
            }
            match self.state(value, axis) {
                Known::Not => votes.unknown += 1,
                Known::Open => votes.open += 1,
                Known::Is(State::Partial) => votes.partial.push(operand),
                Known::Is(State::Replicated) => votes.replicated.push(operand),
                Known::Is(State::Sharded(dim)) => {
                    let dims = &n.rule.inputs[operand][dim];
                    let factor = self.factor(node, dims, value, dim, axis)?;
                    let is_param = self.net.values[value].of_params;
                    let whole = |&f: &usize| n.rule.factors[f].kind == FactorKind::Whole;
                    match factor.filter(|f| !whole(f)) {
                        None => votes.replicated.push(operand),
                        Some(f) => votes.shard(f, operand, is_param),
                    }
                }
            }
        }
        Ok(votes)
    }

    /// What the operands imply; with `partly`, also if some are unknown.
    pub(crate) fn verdict(
        &self,
        node: usize,
        axis: usize,
        partly: bool,
    ) -> Result<Verdict, SpmdError> {
        let n = &self.net.nodes[node];
        let can = |&f: &usize| self.node_choices[node].fits(n, self.grid, f, axis);
        if !(0..n.rule.factors.len()).any(|f| can(&f)) && n.rule.linear.is_empty() {
            return Ok(Verdict::Take(Choice::Replicated));
        }
        let votes = self.votes(node, axis)?;
        let known = votes.shards.len() + votes.partial.len() + votes.replicated.len();
        if votes.unknown > 0 && (!partly || known == 0) {
            return Ok(Verdict::Wait);
        }
        if votes.open > 0 && self.price > 0.0 {
            return Ok(Verdict::Open);
        }
        let end = self.end(node, axis)?.filter(can);
        if votes.shards.is_empty() {
            return Ok(self.without_shards(node, &votes, end));
        }
        if votes.shards.len() > 1 {
            let among = |f: &usize| votes.shards.iter().any(|(g, _, _)| g == f);
            let mut weights = votes.shards.iter().filter(|(_, _, is_param)| *is_param);
            return Ok(match (end.filter(among), weights.next(), weights.next()) {
                (Some(f), _, _) => Verdict::Take(Choice::Factor(f)),
                (None, Some((f, _, _)), None) => Verdict::Take(Choice::Factor(*f)),
                _ => Verdict::Open,
            });
        }
        let (factor, by, _) = &votes.shards[0];
        if n.contracts(*factor, 0) {
            if votes.unknown > 0 {
                return Ok(Verdict::Wait);
            }
            // A contraction needs all its operands.
            let lacking = (0..n.ins.len()).any(|i| n.reads(i, *factor) && !by.contains(&i));
            if lacking {
                return Ok(Verdict::Open);
            }
        }
        Ok(Verdict::Take(Choice::Factor(*factor)))
    }

    fn without_shards(&self, node: usize, votes: &OperandStates, end: Option<usize>) -> Verdict {
        let n = &self.net.nodes[node];
        if !votes.partial.is_empty() {
            let lone = votes.unknown + votes.open + votes.replicated.len() == 0;
            if let (true, Some(group)) =
                (lone, n.rule.linear.iter().position(|g| *g == votes.partial))
            {
                return Verdict::Take(Choice::Partial(group));
            }
            if votes.unknown > 0 {
                return Verdict::Wait;
            }
            if lone {
                return Verdict::Open;
            }
            // A partial sum takes the layout of its decided partner; but a bias has no layout of
            // its own, so the readers of the result have priority.
            let of_params = |&i: &usize| self.net.values[n.ins[i]].of_params;
            return match end {
                Some(f) if self.adds(node) => Verdict::Take(Choice::Factor(f)),
                _ if votes.replicated.iter().all(of_params) => Verdict::Weak,
                _ => Verdict::Take(Choice::Replicated),
            };
        }
        if votes.unknown > 0 {
            return Verdict::Wait;
        }
        let inner = |&i: &usize| self.net.values[n.ins[i]].maker.is_some();
        match end {
            Some(_) if votes.replicated.iter().any(inner) => Verdict::Open,
            Some(f) => Verdict::Take(Choice::Factor(f)),
            None if votes.open > 0 => Verdict::Open,
            None => Verdict::Weak,
        }
    }

    /// The factor that the annotated end of a result has on this axis.
    fn end(&self, node: usize, axis: usize) -> Result<Option<usize>, SpmdError> {
        let n = &self.net.nodes[node];
        for (result, &value) in n.outs.iter().enumerate() {
            let pinned = self.pins.read[value].as_ref().and_then(|p| p.state(axis));
            let goal = || {
                let goal = self.goals[value].first()?;
                match goal.partial {
                    true => Some(self.stored_state(goal.like, axis)),
                    false => self.pins.read[goal.like].as_ref().and_then(|p| p.state(axis)),
                }
            };
            let Some(State::Sharded(dim)) = pinned.or_else(goal) else { continue };
            let dims = &n.rule.outputs[result][dim];
            let dims: Vec<usize> = dims.iter().copied().filter(|&f| n.extents[f] != 1).collect();
            // The annotated axes of the result show which factor is meant.
            let major = match &self.pins.read[value] {
                Some(pin) => self.grid.count(pin.dims[dim].before(axis)),
                None => 1,
            };
            let mut before = major;
            for f in dims {
                if before < n.extents[f] {
                    return Ok((n.rule.factors[f].kind != FactorKind::Whole).then_some(f));
                }
                before /= n.extents[f].max(1);
            }
        }
        Ok(None)
    }

    /// The choice that a gradient inherits from its op: the same factor; or, if the axis does
    /// nothing in the op, a partial cotangent stays partial where the gradient is linear in it.
    fn inherited(&self, node: usize, origin: usize, axis: usize) -> Choice {
        let n = &self.net.nodes[node];
        if let Some(Choice::Factor(f)) = self.choices[origin][axis]
            && let Some(own) = self.maps[node].get(f).copied().flatten()
            && self.node_choices[node].fits(n, self.grid, own, axis)
        {
            return Choice::Factor(own);
        }
        let mut partial = Vec::new();
        for (operand, &value) in n.ins.iter().enumerate() {
            match self.state(value, axis) {
                Known::Is(State::Partial) => partial.push(operand),
                Known::Is(State::Sharded(_)) => return Choice::Replicated,
                _ => {}
            }
        }
        let group = n.rule.linear.iter().position(|g| !partial.is_empty() && *g == partial);
        group.map_or(Choice::Replicated, Choice::Partial)
    }

    /// The cheapest choice for one instruction, given the choices of its neighbours.
    fn cheapest(&self, node: usize, axis: usize) -> Choice {
        let n = &self.net.nodes[node];
        let options = self.node_choices[node].options(n, self.grid, axis);
        let cost = |&choice: &Choice| self.cost_here(node, axis, choice);
        let first = (Choice::Replicated, cost(&Choice::Replicated));
        let better = |best: (Choice, f64), choice: Choice| {
            let own = cost(&choice);
            if own < best.1 - 1e-12 { (choice, own) } else { best }
        };
        options.into_iter().fold(first, better).0
    }

    fn cost_here(&self, node: usize, axis: usize, choice: Choice) -> f64 {
        let n = &self.net.nodes[node];
        let size = self.grid.size(axis);
        let mut cost = 0.0;
        for (operand, &value) in n.ins.iter().enumerate() {
            let Known::Is(state) = self.state(value, axis) else { continue };
            let want = operand_state(n, choice, operand);
            cost += self.costs.step(state, want, size, self.net.values[value].bytes());
        }
        for (result, &value) in n.outs.iter().enumerate() {
            let state = crate::node_choices::result_state(n, choice, result);
            let end = match self.goals[value].first() {
                Some(goal) if goal.partial && state == State::Partial => {
                    match self.stored_state(goal.like, axis) {
                        State::Replicated => State::Partial,
                        sharded => sharded,
                    }
                }
                Some(goal) => self.stored_state(goal.like, axis),
                None if state == State::Partial => State::Replicated,
                None => state,
            };
            cost += self.costs.step(state, end, size, self.net.values[value].bytes());
        }
        cost
    }
}

impl OperandStates {
    fn shard(&mut self, factor: usize, operand: usize, is_param: bool) {
        match self.shards.iter_mut().find(|(f, _, _)| *f == factor) {
            Some((_, by, weight)) => {
                by.push(operand);
                *weight |= is_param;
            }
            None => self.shards.push((factor, vec![operand], is_param)),
        }
    }
}
