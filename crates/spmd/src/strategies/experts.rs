//! Expert parallelism (GShard: Lepikhin et al., 2020): each rank has some of the experts, and tokens
//! travel to those that they chose and back.
//!
//! Experts are distributed to the minor end of the batch's axis, so the ranks that exchange tokens have
//! different ones. Dispatched rows are `[e, groups…, c, d]`. The strategy says that experts read
//! them with `e` on these ranks, and that combine reads the results with the samples there again;
//! the two all-to-alls forward and two backward follow from these layouts. The gradient of an expert
//! is then a sum over the rest of the axis alone, and so is what ZeRO shards.
//!
//! The other way round, tokens stay: every rank gathers all tokens of these ranks, serves those that
//! chose its experts, and the results are summed and scattered ([`ExpertExchange::AllGather`]).
//!
//! Or the experts come to the tokens, which stay ([`ExpertExchange::Weights`]): weights are kept as before, gathered
//! where they are read, forward and backward, and their gradients are scattered. That is data parallelism of
//! experts with the memory of expert parallelism, Tutel's r = 0 (Hwang et al., 2022): three times the weights of
//! a rank's experts times n − 1, however many tokens there are.
//!
//! Per rank, layer and micro-batch, with T tokens of width d, k·f places per token and n ranks, each
//! of the four all-to-alls moves k·f·T·d·(n−1)/n elements, a gather or its sum T·d·(n−1). So tokens
//! are gathered where n < k·f.
//!
//! Two variants are DeepSpeed-MoE's (Rajbhandari et al., 2022). In two steps, first among the ranks of
//! a node and then between nodes, a rank of n = a·b sends a + b − 2 messages instead of n − 1, and moves
//! (a−1)/a + (b−1)/b of its rows instead of (n−1)/n. With tensor parallelism, whose ranks have the same
//! rows, each of them sends a part of every row, and they gather the rest among themselves.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::{Axis, Instr, Mesh, Op, Program, Role, ValueId};

use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::split::AxisSplit;

/// Distributes experts to a part of the ranks that samples are distributed to.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertParallel {
    /// The axis of the batch.
    pub axis: String,
    /// How many of its ranks, at its minor end, share the experts among them.
    pub ranks: usize,
    /// How tokens meet their experts.
    pub exchange: ExpertExchange,
    /// The axis whose ranks have the same rows: the one of tensor parallelism.
    pub alike: String,
}

/// How tokens meet their experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ExpertExchange {
    /// The one of the next two that moves less.
    #[default]
    Cheapest,
    /// Rows travel to their experts and back.
    AllToAll,
    /// Every rank gathers all tokens, and results are summed and scattered.
    AllGather,
    /// Rows travel in two steps, among as many neighbours as divide the ranks most evenly, and between
    /// such groups.
    Hierarchical,
    /// Rows travel in parts, one from each of the ranks that have the same ones.
    Coordinated,
    /// Rows stay, and every rank gathers the weights of all experts.
    Weights,
}

/// Ranks as two factors, the second not greater than the first and as near to it as can be.
pub fn two_factors(ranks: usize) -> Option<(usize, usize)> {
    let inner =
        (2..ranks).take_while(|n| n * n <= ranks).filter(|n| ranks.is_multiple_of(*n)).last()?;
    Some((ranks / inner, inner))
}

impl ExpertParallel {
    /// Over so many ranks of `dp`, by the exchange that moves less.
    pub fn over(ranks: usize) -> Self {
        let (axis, alike) = ("dp".to_owned(), "tp".to_owned());
        Self { axis, ranks, exchange: ExpertExchange::default(), alike }
    }

    /// The parts of the axis that experts are distributed to, as samples are.
    fn parts(&self, mesh: &Mesh) -> Vec<Axis> {
        let mut parts = mesh.find(&self.axis);
        while mesh.count(&parts) > self.ranks && !parts.is_empty() {
            parts.remove(0);
        }
        parts
    }

    /// The same as experts are distributed to them, major to minor.
    fn distributed(&self, mesh: &Mesh) -> Vec<Axis> {
        let mut parts = self.parts(mesh);
        // What moves first from the minor end of the samples is the major end of the experts.
        if self.exchange == ExpertExchange::Hierarchical {
            parts.reverse();
        }
        parts
    }

    fn gathers(&self, program: &Program, found: &Routed) -> bool {
        match self.exchange {
            ExpertExchange::AllToAll
            | ExpertExchange::Hierarchical
            | ExpertExchange::Coordinated
            | ExpertExchange::Weights => false,
            ExpertExchange::AllGather => true,
            ExpertExchange::Cheapest => {
                // Only rows travel, at most as many as there are choices. Bounds that steps try are never below these,
                // so all of them exchange in the same way.
                let rows = found.places(program).min(found.choices(program));
                rows > self.ranks * found.tokens(program)
            }
        }
    }
}

impl Strategy for ExpertParallel {
    fn name(&self) -> &'static str {
        "expert parallelism"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn splits(&self, _program: &Program, mesh: &Mesh) -> Result<Vec<AxisSplit>, SpmdError> {
        let size = mesh.degree(&self.axis);
        if self.ranks == 0 || !size.is_multiple_of(self.ranks) {
            return Err(SpmdError::Shards { axis: self.axis.clone(), size, shard: self.ranks });
        }
        let split = |major| AxisSplit { axis: self.axis.clone(), major };
        let rest = size / self.ranks;
        let mut splits = vec![split(rest)];
        if self.exchange == ExpertExchange::Hierarchical {
            let factors = two_factors(self.ranks);
            let (outer, _) = factors.ok_or(SpmdError::Factors { ranks: self.ranks })?;
            splits.push(split(rest * outer));
        }
        Ok(splits)
    }

    /// Before data parallelism, which replicates the parameters about which nothing is said.
    fn place(&self) -> Precedence {
        Precedence::Experts
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if self.ranks < 2 {
            return Ok(());
        }
        let program = ctx.program();
        let ways = Ways::of(program);
        for (&param, &dim) in &ways.params {
            let experts = program.ty(param).shape[dim];
            if !experts.is_multiple_of(self.ranks) {
                return Err(ctx.refuse(format!(
                    "{experts} experts cannot be divided evenly among {} ranks of `{}`\n  \
                     every rank has the same number of experts\n  \
                     nearest that work: a divisor of {experts} as the number of ranks",
                    self.ranks, self.axis
                )));
            }
        }
        let travels = self.exchange != ExpertExchange::Weights;
        for routed in ways.routed.iter().filter(|own| travels && !own.counts.is_empty()) {
            let parts = program.ty(routed.rows).shape[0];
            if !parts.is_multiple_of(self.ranks) {
                return Err(ctx.refuse(format!(
                    "rows are packed for {parts} ranks with experts, not for the {} of `{}`\n  \
                     nearest that work: a model whose experts have parts = {}",
                    self.ranks, self.axis, self.ranks
                )));
            }
        }
        for part in self.distributed(ctx.mesh()) {
            let part = part.name();
            ways.params.iter().try_for_each(|(&param, &dim)| ctx.shard(param, dim, part))?;
            match self.exchange {
                ExpertExchange::Weights => {
                    ways.by_expert().try_for_each(|value| ctx.shard(value, 1, part))?;
                }
                _ => {
                    for routed in &ways.routed {
                        let mut values = routed.counts.iter().chain([&routed.rows]);
                        values.try_for_each(|&value| ctx.shard(value, 0, part))?;
                    }
                }
            }
        }
        if self.exchange == ExpertExchange::Weights {
            return Ok(());
        }
        ways.routed.iter().try_for_each(|routed| self.route(ctx, routed))
    }
}

/// The parameters of experts, which may be distributed to ranks of the batch.
pub(super) fn of_experts(program: &Program) -> BTreeSet<ValueId> {
    Ways::of(program).params.into_keys().collect()
}

impl ExpertParallel {
    /// Says which layouts meet at the experts of one dispatch.
    fn route(&self, ctx: &mut Annotator<'_>, found: &Routed) -> Result<(), SpmdError> {
        let gathers = self.gathers(ctx.program(), found);
        for part in self.parts(ctx.mesh()) {
            let part = part.name();
            match gathers {
                true => {
                    let mut read = found.sent.iter().chain(&found.combined);
                    read.try_for_each(|&value| ctx.replicate(value, part))?;
                }
                false => {
                    ctx.travel(part)?;
                    found.returned.iter().try_for_each(|&value| ctx.shard(value, 1, part))?;
                }
            }
        }
        match self.exchange == ExpertExchange::Coordinated && ctx.degree(&self.alike) > 1 {
            true => self.coordinate(ctx, found),
            false => Ok(()),
        }
    }

    /// Says that rows travel in parts.
    fn coordinate(&self, ctx: &mut Annotator<'_>, found: &Routed) -> Result<(), SpmdError> {
        let width = ctx.program().ty(found.rows).shape.len() - 1;
        let mut values = [found.rows].into_iter().chain(found.returned.iter().copied());
        values.try_for_each(|value| ctx.shard(value, width, &self.alike))
    }
}

/// A dispatch, and the combines of its rows.
#[derive(Debug)]
struct Routed {
    /// The rows by expert.
    rows: ValueId,
    /// What the dispatch reads.
    sent: Vec<ValueId>,
    /// What experts give back.
    returned: Vec<ValueId>,
    /// What combines read besides.
    combined: Vec<ValueId>,
    /// How many rows each expert has, where rows are packed.
    counts: BTreeSet<ValueId>,
}

impl Routed {
    /// Places of all experts in a group.
    fn places(&self, program: &Program) -> usize {
        let shape = &program.ty(self.rows).shape;
        shape[0] * shape[shape.len() - 2]
    }

    /// Choices of all tokens of a group.
    fn choices(&self, program: &Program) -> usize {
        program.ty(self.sent[1]).shape.iter().rev().take(2).product()
    }

    /// Tokens of a group.
    fn tokens(&self, program: &Program) -> usize {
        let shape = &program.ty(self.sent[0]).shape;
        shape[shape.len() - 2]
    }
}

/// Where tokens go in a segment, found by following the dim of experts from each dispatch on.
#[derive(Debug, Default)]
struct Ways {
    routed: Vec<Routed>,
    /// The parameters of experts, with the dim that counts experts.
    params: BTreeMap<ValueId, usize>,
    /// Values by expert: which dispatch they come from, and the dim that counts experts.
    distributed: BTreeMap<ValueId, (usize, usize)>,
}

impl Ways {
    /// The values of which the first dim counts experts, and the second one samples.
    fn by_expert(&self) -> impl Iterator<Item = ValueId> {
        self.distributed.iter().filter(|(_, (_, dim))| *dim == 0).map(|(value, _)| *value)
    }

    fn of(program: &Program) -> Self {
        let mut ways = Self::default();
        for instr in program.instrs() {
            ways.visit(program, instr);
        }
        ways
    }

    fn visit(&mut self, program: &Program, instr: &Instr) {
        if let Op::Dispatch(_) = instr.op {
            let (rows, sent) = (instr.outputs[0], instr.inputs.clone());
            self.distributed.insert(rows, (self.routed.len(), 0));
            let (returned, combined, counts) = (Vec::new(), Vec::new(), BTreeSet::new());
            return self.routed.push(Routed { rows, sent, returned, combined, counts });
        }
        let distributed = |(i, v)| self.distributed.get(v).map(|&(from, dim)| (i, from, dim));
        let Some((operand, from, dim)) = instr.inputs.iter().enumerate().find_map(distributed)
        else {
            return;
        };
        if let Op::Combine(_) = instr.op {
            self.routed[from].returned.push(instr.inputs[0]);
            return self.routed[from].combined.extend(&instr.inputs[1..]);
        }
        let rule = program.rule(instr);
        if let Op::GroupedMatmul(_) = instr.op {
            self.routed[from].counts.insert(instr.inputs[2]);
        }
        // Experts, or parts of them, which are the major factor of a weight's experts.
        let counts = |dims: &[Vec<usize>]| {
            dims.iter().position(|d| d.starts_with(&rule.inputs[operand][dim]))
        };
        for (value, dims) in instr.inputs.iter().zip(&rule.inputs) {
            let is_param = program.inputs_with(Role::Param).any(|p| p.value == *value);
            if let (true, Some(dim)) = (is_param, counts(dims)) {
                self.params.insert(*value, dim);
            }
        }
        for (&value, dims) in instr.outputs.iter().zip(&rule.outputs) {
            if let Some(dim) = counts(dims) {
                self.distributed.insert(value, (from, dim));
            }
        }
    }
}
