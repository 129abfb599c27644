//! Sharding rules: what each op says about layouts, once.
//!
//! An op names the *factors* its dims are made of, the way an einsum names its letters:
//! `b s d, d e -> b s e` for a projection. A dim may be a compound of factors, major first:
//! `(g r)` are query heads grouped by the key head they share. From that one declaration follow the type check
//! here, and later propagation, partitioning and cost.
//!
//! How partial sums pass is declared as **linear groups**: the sets of operands the op is jointly
//! linear in. Per axis, the operands that are partial must be exactly one group, and the axis must
//! be replicated in all others and on no factor.

mod declare;

use std::collections::{BTreeMap, BTreeSet};

use crate::layout::{Layout, Order, Sharding};
use crate::mesh::{Axis, Mesh};
pub use crate::refusal::{Place, RuleError};
use declare::{Reader, position};

/// What sharding a factor means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FactorKind {
    /// Elements along it are computed independently; an output that lacks it is summed over it,
    /// and comes out partial where it is sharded.
    Free,
    /// Never sharded: the kernel needs all of it.
    Whole,
    /// May be sharded; the op's lowering communicates inside (softmax, norms, cross-entropy over
    /// their last dim), so outputs that lack it are complete.
    Lowered,
}

/// One index of the op's computation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Factor {
    /// The letter of the declaration.
    pub name: String,
    /// Its extent.
    pub size: usize,
    /// What sharding it means.
    pub kind: FactorKind,
}

/// The factors of one dim, major to minor, as indices into [`Rule::factors`].
pub type Dim = Vec<usize>;

/// The sharding rule of one instruction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Every factor of the computation.
    pub factors: Vec<Factor>,
    /// Per operand, per dim, its factors.
    pub inputs: Vec<Vec<Dim>>,
    /// Per result, per dim, its factors.
    pub outputs: Vec<Vec<Dim>>,
    /// Sets of operands the op is jointly linear in.
    pub linear: Vec<Vec<usize>>,
    /// Operands that are added to the first result as they are: their layout must be its layout.
    pub addends: Vec<usize>,
}

impl Rule {
    /// Reads a declaration such as `b s (g r) d, b t g d -> b s (g r) d`.
    ///
    /// `...` stands for any number of leading dims; it must stand for the same dims everywhere.
    /// Sizes come from the shapes. Declarations are constants of this crate, so a malformed one is
    /// a bug, caught by the test that builds every op.
    pub fn declare(text: &str, inputs: &[&[usize]], outputs: &[&[usize]]) -> Self {
        let (left, right) = text.split_once("->").expect("a declaration has an arrow");
        let mut reader = Reader::default();
        let mut side = |text: &str, shapes: &[&[usize]]| -> Vec<Vec<Dim>> {
            (text.split(',').zip(shapes))
                .map(|(operand, shape)| reader.operand(operand, shape))
                .collect()
        };
        let inputs = side(left, inputs);
        let outputs = side(right, outputs);
        let factors = reader.factors();
        Self { factors, inputs, outputs, linear: Vec::new(), addends: Vec::new() }
    }

    /// The rule of an elementwise op: dims align at the right, so an operand with fewer dims is
    /// repeated along the leading ones.
    pub fn elementwise(inputs: &[&[usize]], outputs: &[&[usize]]) -> Self {
        let full = outputs.first().copied().unwrap_or(&[]);
        let dims = |shape: &&[usize]| -> Vec<Dim> {
            (0..shape.len()).map(|i| vec![full.len() - shape.len() + i]).collect()
        };
        Self {
            factors: (full.iter().enumerate())
                .map(|(i, &size)| Factor { name: position(i), size, kind: FactorKind::Free })
                .collect(),
            inputs: inputs.iter().map(dims).collect(),
            outputs: outputs.iter().map(dims).collect(),
            linear: Vec::new(),
            addends: Vec::new(),
        }
    }

    /// Declares the sets of operands that the op is jointly linear in.
    pub fn linear(mut self, groups: &[&[usize]]) -> Self {
        self.linear = groups.iter().map(|g| g.to_vec()).collect();
        self
    }

    /// Declares factors that are never sharded.
    pub fn whole(self, names: &str) -> Self {
        self.mark(names, FactorKind::Whole)
    }

    /// Declares factors over which the op communicates by itself when they are sharded.
    pub fn lowered(self, names: &str) -> Self {
        self.mark(names, FactorKind::Lowered)
    }

    fn mark(mut self, names: &str, kind: FactorKind) -> Self {
        for name in names.split_whitespace() {
            for factor in self.factors.iter_mut().filter(|f| f.name == name) {
                factor.kind = kind;
            }
        }
        self
    }

    /// Checks the layouts of an instruction and returns what each factor is sharded by.
    ///
    /// Fails with the reason in terms of operands, axes and factors; the verifier adds the
    /// instruction and its types.
    pub fn check(
        &self,
        mesh: &Mesh,
        inputs: &[&Layout],
        outputs: &[&Layout],
    ) -> Result<Vec<Sharding>, RuleError> {
        let assignment = self.assign(mesh, inputs, outputs)?;
        let partial = self.linear_partials(&assignment, inputs)?;
        for (index, layout) in outputs.iter().enumerate() {
            let expected = self.expected(mesh, index, &assignment, &partial)?;
            if **layout != expected {
                let axes = layout.differing_axes(&expected);
                return Err(RuleError::Result { index, axes, expected });
            }
            for &addend in &self.addends {
                if index == 0 && *inputs[addend] != expected {
                    return Err(RuleError::Addend { operand: addend, expected });
                }
            }
        }
        Ok(assignment)
    }

    /// The layouts that the results have for these operand layouts; a factor that only results
    /// have stays replicated.
    pub fn infer(&self, mesh: &Mesh, inputs: &[&Layout]) -> Result<Vec<Layout>, RuleError> {
        let assignment = self.assign(mesh, inputs, &[])?;
        let partial = self.linear_partials(&assignment, inputs)?;
        let results = 0..self.outputs.len();
        let layouts = results
            .map(|index| self.expected(mesh, index, &assignment, &partial))
            .collect::<Result<Vec<Layout>, RuleError>>()?;
        for &addend in &self.addends {
            if *inputs[addend] != layouts[0] {
                return Err(RuleError::Addend { operand: addend, expected: layouts[0].clone() });
            }
        }
        Ok(layouts)
    }

    /// What each factor is sharded by, from operands first and then from results that have
    /// factors of their own.
    fn assign(
        &self,
        mesh: &Mesh,
        inputs: &[&Layout],
        outputs: &[&Layout],
    ) -> Result<Vec<Sharding>, RuleError> {
        let mut found: Vec<Option<(usize, Sharding)>> = vec![None; self.factors.len()];
        for (operand, (dims, layout)) in self.inputs.iter().zip(inputs).enumerate() {
            for (factors, sharding) in dims.iter().zip(layout.dims()) {
                for (factor, sharding) in
                    self.fill(mesh, Place::Operand(operand), factors, sharding)?
                {
                    match &found[factor] {
                        None => found[factor] = Some((operand, sharding)),
                        Some((_, other)) if *other == sharding => {}
                        Some((first, other)) => {
                            return Err(RuleError::Disagree {
                                factor: self.factors[factor].name.clone(),
                                axes: differing(other, &sharding),
                                first: *first,
                                second: operand,
                            });
                        }
                    }
                }
            }
        }
        for (result, (dims, layout)) in self.outputs.iter().zip(outputs).enumerate() {
            for (factors, sharding) in dims.iter().zip(layout.dims()) {
                if factors.iter().all(|&f| found[f].is_some()) {
                    // What follows from the operands is compared as a whole later.
                    continue;
                }
                for (factor, sharding) in
                    self.fill(mesh, Place::Result(result), factors, sharding)?
                {
                    found[factor].get_or_insert((usize::MAX, sharding));
                }
            }
        }
        let assignment: Vec<Sharding> =
            found.into_iter().map(|f| f.map(|(_, s)| s).unwrap_or_default()).collect();
        self.one_factor_per_axis(&assignment)?;
        Ok(assignment)
    }

    fn one_factor_per_axis(&self, assignment: &[Sharding]) -> Result<(), RuleError> {
        let mut owner: BTreeMap<Axis, usize> = BTreeMap::new();
        for (factor, sharding) in assignment.iter().enumerate() {
            for &axis in &sharding.axes {
                if let Some(&first) = owner.get(&axis) {
                    return Err(RuleError::TwoFactors {
                        axis,
                        first: self.factors[first].name.clone(),
                        second: self.factors[factor].name.clone(),
                    });
                }
                owner.insert(axis, factor);
                if self.factors[factor].kind == FactorKind::Whole {
                    return Err(RuleError::Whole {
                        axis,
                        factor: self.factors[factor].name.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Deals the axes of one dim to its factors: they fill the major factor, and the next factor
    /// gets axes only when the major one is exhausted. Inside a compound every factor must divide
    /// evenly: the padding of one factor would lie between the elements of the next.
    fn fill(
        &self,
        mesh: &Mesh,
        place: Place,
        factors: &[usize],
        sharding: &Sharding,
    ) -> Result<Vec<(usize, Sharding)>, RuleError> {
        let size = |at: usize| factors.get(at).map_or(1, |&f| self.factors[f].size);
        let compound = (0..factors.len()).filter(|&at| size(at) != 1).count() > 1;
        if let (true, Some(&axis)) =
            (compound && sharding.order != Order::Block, sharding.axes.first())
        {
            return Err(RuleError::Order { axis, place, order: sharding.order });
        }
        let mut out: Vec<(usize, Sharding)> =
            factors.iter().map(|&f| (f, Sharding::default())).collect();
        let (mut at, mut left) = (0, size(0));
        for &axis in &sharding.axes {
            let n = mesh.size(axis).ok_or(RuleError::UnknownAxis { axis })?;
            while left == 1 && at + 1 < factors.len() {
                at += 1;
                left = size(at);
            }
            let Some((factor, filled)) = out.get_mut(at) else {
                return Err(RuleError::UnknownAxis { axis });
            };
            if !left.is_multiple_of(n) && compound {
                let factor = self.factors[*factor].name.clone();
                let last = at + 1 == factors.len();
                return Err(if !last && n.is_multiple_of(left) {
                    RuleError::Straddle { axis, place, factor, left, size: n }
                } else {
                    RuleError::Uneven { axis, place, factor, left, size: n }
                });
            }
            left = left.div_ceil(n);
            filled.axes.push(axis);
            filled.order = sharding.order;
        }
        Ok(out)
    }

    /// The axes over which operands are partial, if they form linear groups.
    fn linear_partials(
        &self,
        assignment: &[Sharding],
        inputs: &[&Layout],
    ) -> Result<BTreeSet<Axis>, RuleError> {
        let operands = || (0..inputs.len()).filter(|i| !self.addends.contains(i));
        let axes: BTreeSet<Axis> =
            operands().flat_map(|i| inputs[i].partial().iter().copied()).collect();
        for &axis in &axes {
            let partial: Vec<usize> =
                operands().filter(|&i| inputs[i].partial().contains(&axis)).collect();
            if let Some(factor) = assignment.iter().position(|s| s.axes.contains(&axis)) {
                let factor = self.factors[factor].name.clone();
                return Err(RuleError::PartialAndSharded { axis, operand: partial[0], factor });
            }
            if !self.linear.contains(&partial) {
                return Err(RuleError::NotLinear {
                    axis,
                    partial,
                    groups: self.linear.clone(),
                    operands: inputs.len(),
                });
            }
        }
        Ok(axes)
    }

    /// The layout of a result that follows from what each factor is sharded by.
    fn expected(
        &self,
        mesh: &Mesh,
        index: usize,
        assignment: &[Sharding],
        partial: &BTreeSet<Axis>,
    ) -> Result<Layout, RuleError> {
        let dims = &self.outputs[index];
        let has = |factor: usize| dims.iter().any(|d| d.contains(&factor));
        let mut partial = partial.clone();
        for (factor, sharding) in assignment.iter().enumerate() {
            if self.factors[factor].kind == FactorKind::Free && !has(factor) {
                partial.extend(sharding.axes.iter().copied());
            }
        }
        let dims = (dims.iter())
            .map(|factors| self.joined(mesh, index, factors, assignment))
            .collect::<Result<Vec<Sharding>, RuleError>>()?;
        // The assignment has each axis on one factor and the partial axes on none, so this holds.
        Ok(Layout::new(dims, partial).unwrap_or_default())
    }

    /// The sharding of a result's dim, from its factors'. Only a sharding that deals its axes back
    /// to the same factors describes the data that the ranks hold: axes of a minor factor would be
    /// read as axes of the major one, unless that is exhausted.
    fn joined(
        &self,
        mesh: &Mesh,
        index: usize,
        factors: &[usize],
        assignment: &[Sharding],
    ) -> Result<Sharding, RuleError> {
        let mut open: Option<(usize, usize)> = None;
        for &factor in factors {
            let axes = &assignment[factor].axes;
            let cut = axes.iter().copied().filter(|&a| mesh.size(a) != Some(1)).collect::<Vec<_>>();
            if let (Some((major, left)), false) = (open, cut.is_empty()) {
                return Err(RuleError::Minor {
                    index,
                    axes: cut,
                    operand: self.inputs.iter().position(|d| d.concat().contains(&factor)),
                    minor: self.factors[factor].name.clone(),
                    major: self.factors[major].name.clone(),
                    left,
                });
            }
            let left = self.factors[factor].size.div_ceil(mesh.count(&cut));
            if left != 1 {
                open = open.or(Some((factor, left)));
            }
        }
        let carriers = || factors.iter().map(|&f| &assignment[f]).filter(|s| !s.axes.is_empty());
        let sharding = Sharding {
            axes: carriers().flat_map(|s| s.axes.iter().copied()).collect(),
            order: carriers().next().map_or(Order::Block, |s| s.order),
        };
        self.fill(mesh, Place::Result(index), factors, &sharding)?;
        Ok(sharding)
    }
}

/// The axes in which two shardings differ; all of them where only the order does.
fn differing(a: &Sharding, b: &Sharding) -> Vec<Axis> {
    let only = |x: &Sharding, y: &Sharding| -> Vec<Axis> {
        x.axes.iter().copied().filter(|axis| !y.axes.contains(axis)).collect()
    };
    let found = [only(a, b), only(b, a)].concat();
    if found.is_empty() { a.axes.clone() } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts(mesh: &Mesh, texts: &[(&str, usize)]) -> Vec<Layout> {
        texts.iter().map(|(t, rank)| Layout::parse(t, *rank, mesh).unwrap()).collect()
    }

    fn infer(rule: &Rule, mesh: &Mesh, ins: &[(&str, usize)]) -> Result<Vec<String>, RuleError> {
        let ins = layouts(mesh, ins);
        let refs: Vec<&Layout> = ins.iter().collect();
        Ok(rule.infer(mesh, &refs)?.iter().map(Layout::to_string).collect())
    }

    fn matmul() -> Rule {
        Rule::declare("b s d, d e -> b s e", &[&[8, 16, 32], &[32, 64]], &[&[8, 16, 64]])
            .linear(&[&[0], &[1]])
    }

    #[test]
    fn a_contracted_shard_gives_a_partial_sum() {
        let mesh: Mesh = "dp=2 tp=4".parse().unwrap();
        let got = infer(&matmul(), &mesh, &[("0:dp 2:tp", 3), ("0:tp", 2)]).unwrap();
        assert_eq!(got, ["{0:dp P:tp}"]);
        let got = infer(&matmul(), &mesh, &[("0:dp", 3), ("1:tp", 2)]).unwrap();
        assert_eq!(got, ["{0:dp 2:tp}"]);
    }

    #[test]
    fn partial_operands_must_form_one_linear_group() {
        let mesh: Mesh = "a=2 b=2".parse().unwrap();
        let got = infer(&matmul(), &mesh, &[("P:a", 3), ("P:b", 2)]).unwrap();
        assert_eq!(got, ["{P:a,b}"]);
        let error = infer(&matmul(), &mesh, &[("P:a", 3), ("P:a", 2)]).unwrap_err();
        assert!(matches!(error, RuleError::NotLinear { .. }));
    }

    #[test]
    fn compound_dims_fill_the_major_factor_first() {
        let mesh: Mesh = "tp=4".parse().unwrap();
        let rule = Rule::declare(
            "b s (g r) d, b t g d -> b s (g r) d",
            &[&[2, 8, 8, 4], &[2, 8, 2, 4]],
            &[&[2, 8, 8, 4]],
        );
        let sizes: Vec<(String, usize)> =
            rule.factors.iter().map(|f| (f.name.clone(), f.size)).collect();
        assert!(sizes.contains(&("g".into(), 2)) && sizes.contains(&("r".into(), 4)));
        let error = infer(&rule, &mesh, &[("2:tp", 4), ("", 4)]).unwrap_err();
        assert!(matches!(error, RuleError::Straddle { left: 2, size: 4, .. }), "{error:?}");
        let split = mesh.split("tp", &[2, 2]).unwrap();
        let got = infer(&rule, &split, &[("2:tp", 4), ("2:tp.0", 4)]).unwrap();
        assert_eq!(got, ["{2:tp.0,tp.1}"]);
    }

    #[test]
    fn a_result_keeps_the_axes_of_a_minor_factor_only_behind_an_exhausted_major_one() {
        let mesh: Mesh = "a=2 b=2 tp=8 one=1".parse().unwrap();
        let merge = Rule::declare("x y -> (x y)", &[&[8, 16]], &[&[128]]);
        assert_eq!(infer(&merge, &mesh, &[("0:tp", 2)]).unwrap(), ["{0:tp}"]);
        assert_eq!(infer(&merge, &mesh, &[("0:tp 1:a", 2)]).unwrap(), ["{0:tp,a}"]);
        assert_eq!(infer(&merge, &mesh, &[("0:a 1:one", 2)]).unwrap(), ["{0:a,one}"]);
        for layout in ["1:tp", "1:a", "0:a 1:b"] {
            let error = infer(&merge, &mesh, &[(layout, 2)]).unwrap_err();
            assert!(matches!(error, RuleError::Minor { operand: Some(0), .. }), "{error:?}");
            // Neither is it accepted as declared.
            let ins = layouts(&mesh, &[(layout, 2)]);
            let outs = layouts(&mesh, &[("0:tp", 1)]);
            assert!(merge.check(&mesh, &[&ins[0]], &[&outs[0]]).is_err());
        }
    }

    #[test]
    fn no_factor_of_a_compound_is_padded() {
        let mesh: Mesh = "a=2 b=3".parse().unwrap();
        let split = Rule::declare("(x y) -> x y", &[&[10]], &[&[2, 5]]);
        for layout in ["0:b", "0:a,b"] {
            let error = infer(&split, &mesh, &[(layout, 1)]).unwrap_err();
            assert!(matches!(error, RuleError::Uneven { size: 3, .. }), "{layout}: {error:?}");
        }
        // A padded dim does not flow into a compound either.
        let merge = Rule::declare("x y -> (x y)", &[&[5, 2]], &[&[10]]);
        let error = infer(&merge, &mesh, &[("0:a", 2)]).unwrap_err();
        assert!(matches!(error, RuleError::Uneven { place: Place::Result(0), .. }), "{error:?}");
        // A dim of one factor may be padded.
        let plain = Rule::declare("x -> x", &[&[5]], &[&[5]]);
        assert_eq!(infer(&plain, &mesh, &[("0:a", 1)]).unwrap(), ["{0:a}"]);
    }

    #[test]
    fn the_order_comes_from_the_factor_that_carries_axes() {
        let mesh: Mesh = "a=2".parse().unwrap();
        let merge = Rule::declare("x y -> (x y)", &[&[1, 16]], &[&[16]]);
        assert_eq!(infer(&merge, &mesh, &[("1:a@zigzag", 2)]).unwrap(), ["{0:a@zigzag}"]);
        let merge = Rule::declare("x y -> (x y)", &[&[8, 16]], &[&[128]]);
        let error = infer(&merge, &mesh, &[("0:a@striped", 2)]).unwrap_err();
        assert!(matches!(error, RuleError::Order { .. }), "{error:?}");
        let split = Rule::declare("(x y) -> x y", &[&[128]], &[&[8, 16]]);
        let error = infer(&split, &mesh, &[("0:a@striped", 1)]).unwrap_err();
        assert!(matches!(error, RuleError::Order { .. }), "{error:?}");
    }

    #[test]
    fn ellipses_and_suffixes_align() {
        let rule = Rule::declare(
            "... d, d -> ... d, ...",
            &[&[8, 16, 32], &[32]],
            &[&[8, 16, 32], &[8, 16]],
        );
        assert_eq!(rule.outputs[1], [vec![0], vec![1]]);
        let rule = Rule::elementwise(&[&[8, 16, 32], &[32]], &[&[8, 16, 32]]);
        assert_eq!(rule.inputs[1], [vec![2]]);
    }
}
