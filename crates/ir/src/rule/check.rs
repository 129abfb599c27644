//! Checks layouts against a rule: axes are assigned to factors, and factors to results.

use std::collections::{BTreeMap, BTreeSet};

use super::padding::carrier;
use super::{FactorKind, Place, Rule, RuleError};
use crate::layout::{Layout, Order, Sharding};
use crate::mesh::{Axis, Mesh};

/// A rule on a mesh, with the padded extent of each factor.
pub(super) struct Check<'a> {
    pub(super) rule: &'a Rule,
    pub(super) mesh: &'a Mesh,
    pub(super) extents: &'a [usize],
}

impl Check<'_> {
    /// What each factor is sharded by, if the layouts fit the rule.
    pub(super) fn types(
        &self,
        inputs: &[&Layout],
        outputs: &[&Layout],
    ) -> Result<Vec<Sharding>, RuleError> {
        let assignment = self.assign(inputs, outputs)?;
        let partial = self.linear_partials(&assignment, inputs)?;
        for (index, layout) in outputs.iter().enumerate() {
            let expected = self.expected(index, &assignment, &partial)?;
            if **layout != expected {
                let axes = layout.differing_axes(&expected);
                return Err(RuleError::Result { index, axes, expected });
            }
            self.addends(index, inputs, &expected)?;
        }
        Ok(assignment)
    }

    /// The layouts of the results; a factor that only results have stays replicated.
    pub(super) fn results(&self, inputs: &[&Layout]) -> Result<Vec<Layout>, RuleError> {
        let assignment = self.assign(inputs, &[])?;
        let partial = self.linear_partials(&assignment, inputs)?;
        let results = 0..self.rule.outputs.len();
        let layouts = results
            .map(|index| self.expected(index, &assignment, &partial))
            .collect::<Result<Vec<Layout>, RuleError>>()?;
        for (index, layout) in layouts.iter().enumerate() {
            self.addends(index, inputs, layout)?;
        }
        Ok(layouts)
    }

    /// Operands that are added to a result must have its layout.
    fn addends(
        &self,
        index: usize,
        inputs: &[&Layout],
        expected: &Layout,
    ) -> Result<(), RuleError> {
        let mut added = self.rule.addends.iter().filter(|(_, result)| *result == index);
        match added.find(|&&(operand, _)| inputs[operand] != expected) {
            None => Ok(()),
            Some(&(operand, _)) => {
                let axes = inputs[operand].differing_axes(expected);
                Err(RuleError::Addend { operand, axes, expected: expected.clone() })
            }
        }
    }

    /// What each factor is sharded by, first from operands, then from results with their own
    /// factors.
    fn assign(&self, inputs: &[&Layout], outputs: &[&Layout]) -> Result<Vec<Sharding>, RuleError> {
        let mut found: Vec<Option<(usize, Sharding)>> = vec![None; self.rule.factors.len()];
        for (operand, (dims, layout)) in self.rule.inputs.iter().zip(inputs).enumerate() {
            for (factors, sharding) in dims.iter().zip(layout.dims()) {
                for (factor, sharding) in self.fill(Place::Operand(operand), factors, sharding)? {
                    match &found[factor] {
                        None => found[factor] = Some((operand, sharding)),
                        Some((_, other)) if *other == sharding => {}
                        Some((first, other)) => {
                            return Err(RuleError::Disagree {
                                factor: self.rule.factors[factor].name.clone(),
                                axes: differing(other, &sharding),
                                first: *first,
                                second: operand,
                            });
                        }
                    }
                }
            }
        }
        for (result, (dims, layout)) in self.rule.outputs.iter().zip(outputs).enumerate() {
            for (factors, sharding) in dims.iter().zip(layout.dims()) {
                if factors.iter().all(|&f| found[f].is_some()) {
                    // Layouts that follow from operands are compared later.
                    continue;
                }
                for (factor, sharding) in self.fill(Place::Result(result), factors, sharding)? {
                    found[factor].get_or_insert((usize::MAX, sharding));
                }
            }
        }
        // If the layouts of results are to be inferred, a factor that only results have is unknown:
        // it is replicated.
        let sharding = |found: Option<(usize, Sharding)>| match found {
            Some((_, sharding)) => sharding,
            None => Sharding::default(),
        };
        let assignment: Vec<Sharding> = found.into_iter().map(sharding).collect();
        self.one_factor_per_axis(&assignment)?;
        self.blocks(&assignment)?;
        Ok(assignment)
    }

    fn blocks(&self, assignment: &[Sharding]) -> Result<(), RuleError> {
        let factors = self.rule.factors.iter().zip(assignment);
        let mut dealt = factors.filter(|(factor, sharding)| {
            factor.in_blocks
                && sharding.order != Order::Block
                && self.mesh.count(&sharding.axes) > 1
        });
        match dealt.next() {
            None => Ok(()),
            Some((factor, sharding)) => Err(RuleError::Dealt {
                axis: sharding.axes[0],
                factor: factor.name.clone(),
                order: sharding.order,
            }),
        }
    }

    fn one_factor_per_axis(&self, assignment: &[Sharding]) -> Result<(), RuleError> {
        let mut owners: BTreeMap<Axis, Vec<usize>> = BTreeMap::new();
        for (factor, sharding) in assignment.iter().enumerate() {
            for &axis in &sharding.axes {
                let owners = owners.entry(axis).or_default();
                if let Some(&first) = owners.iter().find(|&&first| !self.are_apart(first, factor)) {
                    return Err(RuleError::TwoFactors {
                        axis,
                        first: self.rule.factors[first].name.clone(),
                        second: self.rule.factors[factor].name.clone(),
                    });
                }
                owners.push(factor);
                if self.rule.factors[factor].kind == FactorKind::Whole {
                    return Err(RuleError::Whole {
                        axis,
                        factor: self.rule.factors[factor].name.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    fn kind(&self, factor: usize) -> FactorKind {
        self.rule.factors[factor].kind
    }

    /// Whether two factors belong to different computations.
    fn are_apart(&self, first: usize, second: usize) -> bool {
        match [first, second].map(|f| self.rule.factors[f].kind) {
            [FactorKind::Branch(first), FactorKind::Branch(second)] => first != second,
            [FactorKind::Here, _] | [_, FactorKind::Here] => true,
            _ => false,
        }
    }

    /// Assigns the axes of one dim to its factors: they fill the major factor, and the next factor
    /// gets axes only when the major one is fully sharded. Every shard count divides the padded
    /// extent.
    fn fill(
        &self,
        place: Place,
        factors: &[usize],
        sharding: &Sharding,
    ) -> Result<Vec<(usize, Sharding)>, RuleError> {
        let size = |at: usize| factors.get(at).map_or(1, |&f| self.extents[f]);
        let compound = (0..factors.len()).filter(|&at| size(at) != 1).count() > 1;
        if let (true, Some(&axis)) = (compound && !in_place(sharding), sharding.axes.first()) {
            return Err(RuleError::Order { axis, place, order: sharding.order });
        }
        let mut out: Vec<(usize, Sharding)> =
            factors.iter().map(|&f| (f, Sharding::default())).collect();
        let (mut at, mut left) = (0, size(0));
        for &axis in &sharding.axes {
            let n = self.mesh.size(axis).ok_or(RuleError::UnknownAxis { axis })?;
            while left == 1 && at + 1 < factors.len() {
                at += 1;
                left = size(at);
            }
            let Some((factor, filled)) = out.get_mut(at) else {
                return Err(RuleError::UnknownAxis { axis });
            };
            if !left.is_multiple_of(n) {
                let (size, factor) = (n, self.rule.factors[*factor].name.clone());
                let last = at + 1 == factors.len();
                if !last && n.is_multiple_of(left) {
                    return Err(RuleError::Straddle { axis, place, factor, left, size });
                }
                let shards = self.mesh.count(&filled.axes) * n;
                let enough = self.extents[factors[at]].next_multiple_of(shards);
                let padded = (carrier(self.rule, factors) == Some(at)).then_some(enough);
                return Err(RuleError::Uneven { axis, place, factor, left, size, padded });
            }
            left /= n;
            filled.axes.push(axis);
            (filled.order, filled.turn) = (sharding.order, sharding.turn);
        }
        Ok(out)
    }

    /// The axes over which operands are partial, if they form linear groups.
    fn linear_partials(
        &self,
        assignment: &[Sharding],
        inputs: &[&Layout],
    ) -> Result<BTreeSet<Axis>, RuleError> {
        let operands = || (0..inputs.len()).filter(|&i| self.rule.added_to(i).is_none());
        let axes: BTreeSet<Axis> =
            operands().flat_map(|i| inputs[i].partial().iter().copied()).collect();
        for &axis in &axes {
            if self.mesh.size(axis).is_none() {
                return Err(RuleError::UnknownAxis { axis });
            }
            let partial: Vec<usize> =
                operands().filter(|&i| inputs[i].partial().contains(&axis)).collect();
            if let Some(factor) = assignment.iter().position(|s| s.axes.contains(&axis)) {
                let factor = self.rule.factors[factor].name.clone();
                return Err(RuleError::PartialAndSharded { axis, operand: partial[0], factor });
            }
            if !self.rule.linear.contains(&partial) {
                return Err(RuleError::NotLinear {
                    axis,
                    partial,
                    groups: self.rule.linear.clone(),
                    operands: inputs.len(),
                });
            }
        }
        Ok(axes)
    }

    /// The layout of a result that follows from what each factor is sharded by.
    fn expected(
        &self,
        index: usize,
        assignment: &[Sharding],
        partial: &BTreeSet<Axis>,
    ) -> Result<Layout, RuleError> {
        let dims = &self.rule.outputs[index];
        let has = |factor: usize| dims.iter().any(|d| d.contains(&factor));
        let mut partial = partial.clone();
        for (factor, sharding) in assignment.iter().enumerate() {
            if self.rule.factors[factor].kind == FactorKind::Free && !has(factor) {
                partial.extend(sharding.axes.iter().copied());
            }
        }
        // A result that has the part which is here speaks of that part, as far as it was summed.
        for factor in dims.iter().flatten().filter(|&&f| self.kind(f) == FactorKind::Here) {
            partial.retain(|axis| !assignment[*factor].axes.contains(axis));
        }
        let dims = (dims.iter())
            .map(|factors| self.joined(index, factors, assignment))
            .collect::<Result<Vec<Sharding>, RuleError>>()?;
        Ok(Layout::new(dims, partial)
            .expect("an assignment has each axis on one factor and partial axes on none"))
    }

    /// The sharding of a result's dim, from those of its factors. It describes the data of the
    /// ranks only if its axes are assigned back to the same factors: axes of a minor factor would
    /// be read as axes of the major one, unless that is fully sharded.
    fn joined(
        &self,
        index: usize,
        factors: &[usize],
        assignment: &[Sharding],
    ) -> Result<Sharding, RuleError> {
        let mut open: Option<(usize, usize)> = None;
        for &factor in factors {
            let axes = &assignment[factor].axes;
            let cut =
                axes.iter().copied().filter(|&a| self.mesh.size(a) != Some(1)).collect::<Vec<_>>();
            if let (Some((major, left)), false) = (open, cut.is_empty()) {
                return Err(RuleError::Minor {
                    index,
                    axes: cut,
                    operand: self.rule.inputs.iter().position(|d| d.concat().contains(&factor)),
                    minor: self.rule.factors[factor].name.clone(),
                    major: self.rule.factors[major].name.clone(),
                    left,
                });
            }
            let left = self.extents[factor] / self.mesh.count(&cut);
            if left != 1 {
                open = open.or(Some((factor, left)));
            }
        }
        let carriers = || factors.iter().map(|&f| &assignment[f]).filter(|s| !s.axes.is_empty());
        let sharding = Sharding {
            axes: carriers().flat_map(|s| s.axes.iter().copied()).collect(),
            // The order of only a minor factor is not the order of the dim; `fill` detects that.
            order: carriers().map(|s| s.order).find(|&o| o != Order::Block).unwrap_or(Order::Block),
            turn: carriers().fold(0, |turn, s| turn.max(s.turn)),
        };
        self.fill(Place::Result(index), factors, &sharding)?;
        Ok(sharding)
    }
}

/// Whether shard `i` holds the `i`-th block.
fn in_place(sharding: &Sharding) -> bool {
    sharding.order == Order::Block && sharding.turn == 0
}

/// The axes in which two shardings differ; all of them where only the order does.
fn differing(a: &Sharding, b: &Sharding) -> Vec<Axis> {
    let only = |x: &Sharding, y: &Sharding| -> Vec<Axis> {
        x.axes.iter().copied().filter(|axis| !y.axes.contains(axis)).collect()
    };
    let found = [only(a, b), only(b, a)].concat();
    if found.is_empty() { a.axes.clone() } else { found }
}
