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

use std::collections::{BTreeMap, BTreeSet};

use crate::layout::{Layout, Sharding};
use crate::mesh::{Axis, Mesh};

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
                .map(|(i, &size)| Factor { name: letter(i), size, kind: FactorKind::Free })
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
            let expected = self.expected(index, &assignment, &partial);
            if **layout != expected {
                return Err(RuleError::Result { index, expected });
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
        let layouts: Vec<Layout> =
            results.map(|index| self.expected(index, &assignment, &partial)).collect();
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
        let operands = self.inputs.iter().zip(inputs).enumerate();
        for (operand, (dims, layout)) in operands {
            for (dim, factors) in dims.iter().enumerate() {
                for (factor, sharding) in self.fill(mesh, operand, dim, factors, layout)? {
                    match &found[factor] {
                        None => found[factor] = Some((operand, sharding)),
                        Some((_, other)) if *other == sharding => {}
                        Some((first, _)) => {
                            return Err(RuleError::Disagree {
                                factor: self.factors[factor].name.clone(),
                                first: *first,
                                second: operand,
                            });
                        }
                    }
                }
            }
        }
        for (dims, layout) in self.outputs.iter().zip(outputs) {
            for (dim, factors) in dims.iter().enumerate() {
                for (factor, sharding) in self.fill(mesh, usize::MAX, dim, factors, layout)? {
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
    /// gets axes only when the major one is exhausted.
    fn fill(
        &self,
        mesh: &Mesh,
        operand: usize,
        dim: usize,
        factors: &[usize],
        layout: &Layout,
    ) -> Result<Vec<(usize, Sharding)>, RuleError> {
        let sharding = &layout.dims()[dim];
        let mut out: Vec<(usize, Sharding)> = (factors.iter())
            .map(|&f| (f, Sharding { axes: Vec::new(), order: sharding.order }))
            .collect();
        let mut at = 0;
        let mut left = factors.first().map_or(1, |&f| self.factors[f].size);
        for &axis in &sharding.axes {
            let n = mesh.size(axis).ok_or(RuleError::UnknownAxis { axis })?;
            while left == 1 && at + 1 < factors.len() {
                at += 1;
                left = self.factors[factors[at]].size;
            }
            let Some((_, filled)) = out.get_mut(at) else {
                return Err(RuleError::UnknownAxis { axis });
            };
            let last = at + 1 == factors.len();
            if left.is_multiple_of(n) {
                left /= n;
            } else if !last && n.is_multiple_of(left) {
                let factor = self.factors[factors[at]].name.clone();
                return Err(RuleError::Straddle { axis, operand, factor, left, size: n });
            } else if !last && at > 0 {
                let factor = self.factors[factors[at]].name.clone();
                return Err(RuleError::Uneven { axis, operand, factor, left, size: n });
            } else {
                left = left.div_ceil(n);
            }
            filled.axes.push(axis);
        }
        for (_, filled) in &mut out {
            if filled.axes.is_empty() {
                filled.order = crate::layout::Order::Block;
            }
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

    fn expected(&self, index: usize, assignment: &[Sharding], partial: &BTreeSet<Axis>) -> Layout {
        let dims = &self.outputs[index];
        let has = |factor: usize| dims.iter().any(|d| d.contains(&factor));
        let mut partial = partial.clone();
        for (factor, sharding) in assignment.iter().enumerate() {
            if self.factors[factor].kind == FactorKind::Free && !has(factor) {
                partial.extend(sharding.axes.iter().copied());
            }
        }
        let dims = (dims.iter())
            .map(|factors| Sharding {
                axes: factors.iter().flat_map(|&f| assignment[f].axes.clone()).collect(),
                order: factors.first().map_or_else(Default::default, |&f| assignment[f].order),
            })
            .collect();
        // The assignment has each axis on one factor and the partial axes on none, so this holds.
        Layout::new(dims, partial).unwrap_or_default()
    }
}

/// Why layouts do not fit a rule. Operands are numbered from 0; `usize::MAX` is the result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleError {
    /// The mesh has no such axis.
    UnknownAxis {
        /// The axis.
        axis: Axis,
    },
    /// Two operands shard one factor differently.
    Disagree {
        /// The factor.
        factor: String,
        /// The first operand.
        first: usize,
        /// The operand that differs.
        second: usize,
    },
    /// One axis shards two factors.
    TwoFactors {
        /// The axis.
        axis: Axis,
        /// One factor.
        first: String,
        /// The other.
        second: String,
    },
    /// A factor that the kernel needs whole is sharded.
    Whole {
        /// The axis.
        axis: Axis,
        /// The factor.
        factor: String,
    },
    /// An axis covers the end of one factor and the start of the next.
    Straddle {
        /// The axis.
        axis: Axis,
        /// The operand.
        operand: usize,
        /// The factor that ends inside the axis.
        factor: String,
        /// What is left of that factor.
        left: usize,
        /// The size of the axis.
        size: usize,
    },
    /// A minor factor of a compound dim would have to be padded.
    Uneven {
        /// The axis.
        axis: Axis,
        /// The operand.
        operand: usize,
        /// The factor.
        factor: String,
        /// What is left of it.
        left: usize,
        /// The size of the axis.
        size: usize,
    },
    /// The operands that are partial over an axis are not one of the op's linear groups.
    NotLinear {
        /// The axis.
        axis: Axis,
        /// The operands that are partial over it.
        partial: Vec<usize>,
        /// What the op is linear in.
        groups: Vec<Vec<usize>>,
        /// How many operands there are.
        operands: usize,
    },
    /// An operand is partial over an axis that shards a factor of the op.
    PartialAndSharded {
        /// The axis.
        axis: Axis,
        /// The partial operand.
        operand: usize,
        /// The sharded factor.
        factor: String,
    },
    /// An operand that is added to the result has another layout than it.
    Addend {
        /// The operand.
        operand: usize,
        /// The layout it needs.
        expected: Layout,
    },
    /// A result is declared with another layout than follows from the operands.
    Result {
        /// Which result.
        index: usize,
        /// The layout that follows.
        expected: Layout,
    },
}

/// Reads declarations, giving each factor a number and a size.
#[derive(Default)]
struct Reader {
    names: Vec<String>,
    sizes: Vec<Option<usize>>,
    /// The size of the compound dim each factor was last seen in, to solve for one unknown.
    compounds: Vec<(Vec<usize>, usize)>,
}

impl Reader {
    fn operand(&mut self, text: &str, shape: &[usize]) -> Vec<Dim> {
        let tokens = tokens(text);
        let named = tokens.iter().filter(|t| t.as_slice() != ["..."]).count();
        let mut dims = Vec::new();
        for token in tokens {
            if token == ["..."] {
                // Leading dims align at the left: they are the same dims in every operand.
                for i in 0..shape.len() - named {
                    let factor = self.factor(&format!("{}'", letter(i)));
                    self.sizes[factor] = Some(shape[dims.len()]);
                    dims.push(vec![factor]);
                }
                continue;
            }
            let factors: Dim = token.iter().map(|name| self.factor(name)).collect();
            let size = shape[dims.len()];
            match factors.as_slice() {
                [one] => self.sizes[*one] = Some(size),
                _ => self.compounds.push((factors.clone(), size)),
            }
            dims.push(factors);
        }
        dims
    }

    fn factor(&mut self, name: &str) -> usize {
        if let Some(found) = self.names.iter().position(|n| n == name) {
            return found;
        }
        self.names.push(name.to_owned());
        self.sizes.push(None);
        self.names.len() - 1
    }

    fn factors(mut self) -> Vec<Factor> {
        for (factors, size) in self.compounds.clone() {
            let known: usize = factors.iter().filter_map(|&f| self.sizes[f]).product();
            for f in factors {
                self.sizes[f].get_or_insert(size / known.max(1));
            }
        }
        (self.names.into_iter().zip(self.sizes))
            .map(|(name, size)| Factor { name, size: size.unwrap_or(1), kind: FactorKind::Free })
            .collect()
    }
}

/// Splits `b s (g r) ...` into dims, each a list of names.
fn tokens(text: &str) -> Vec<Vec<&str>> {
    let mut out = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('(') {
            let (compound, tail) = inner.split_once(')').expect("parentheses close");
            out.push(compound.split_whitespace().collect());
            rest = tail.trim_start();
        } else {
            let (name, tail) = rest.split_once(' ').unwrap_or((rest, ""));
            out.push(vec![name]);
            rest = tail.trim_start();
        }
    }
    out
}

fn letter(index: usize) -> String {
    char::from(b'a' + (index % 26) as u8).to_string()
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
