//! Sharding rules: how each op relates the layouts of its operands and results.
//!
//! An op names the *factors* its dims are made of, the way an einsum names its letters:
//! `b s d, d e -> b s e` for a projection. A dim may be a compound of factors, major first:
//! `(g r)` are query heads grouped by the key head they share. From that one declaration follow the type check
//! here, and later propagation, partitioning and cost.
//!
//! How an op handles partial sums is declared as **linear groups**: the sets of operands the op is
//! jointly linear in. Per axis, the operands that are partial must be exactly one group, and the
//! axis must be replicated in all others and on no factor.
//!
//! A padded extent belongs to a factor too: all dims that share the factor are padded in the same
//! way, in every layout, so a block that is gathered over one of two axes is the block of the
//! other.

mod check;
mod declare;
mod padding;

use crate::layout::{Layout, Sharding};
use crate::mesh::Mesh;
pub use crate::refusal::{Place, RuleError};
use crate::types::TensorType;
use check::Check;
use declare::{Reader, position};

/// What sharding a factor means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FactorKind {
    /// Elements along it are computed independently; an output without it is summed over it, and is
    /// a partial sum if the factor is sharded.
    Free,
    /// Never sharded: the kernel needs all of it.
    Whole,
    /// May be sharded; the op's lowering communicates inside (softmax, norms, cross-entropy over
    /// their last dim), so outputs without it are complete.
    Lowered,
    /// Like `Free`, but it belongs to only one of several computations that share operands: the one
    /// with this number. The outputs of the others are not summed over it, and their factors may be
    /// sharded by the same axes.
    Branch(usize),
    /// A part of it that is here: the op computes with that alone, so it may be sharded by axes of
    /// other factors, and outputs without it speak of this part only.
    Here,
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
    /// Whether a rank's part must be one block: the op finds its elements by where that begins.
    pub in_blocks: bool,
}

impl Factor {
    fn free(name: String, size: usize) -> Self {
        Self { name, size, kind: FactorKind::Free, in_blocks: false }
    }
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
    /// Operands that are added to a result, with the result: they must have its layout.
    pub addends: Vec<(usize, usize)>,
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
        let full = outputs[0];
        let dims = |shape: &&[usize]| -> Vec<Dim> {
            (0..shape.len()).map(|i| vec![full.len() - shape.len() + i]).collect()
        };
        Self {
            factors: (full.iter().enumerate())
                .map(|(i, &size)| Factor::free(position(i), size))
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

    /// Declares factors over which the op itself communicates when they are sharded.
    pub fn lowered(self, names: &str) -> Self {
        self.mark(names, FactorKind::Lowered)
    }

    /// Declares factors that belong to only one of several computations that share operands.
    pub fn branch(self, number: usize, names: &str) -> Self {
        self.mark(names, FactorKind::Branch(number))
    }

    /// Declares factors of which the op computes with the part that is here.
    pub fn here(self, names: &str) -> Self {
        self.mark(names, FactorKind::Here)
    }

    /// Declares factors that are not distributed in other orders than by blocks.
    pub fn in_blocks(mut self, names: &str) -> Self {
        for factor in &mut self.factors {
            factor.in_blocks |= names.split_whitespace().any(|name| name == factor.name);
        }
        self
    }

    /// Declares operands that are added to results.
    pub fn adding(mut self, addends: &[(usize, usize)]) -> Self {
        self.addends = addends.to_vec();
        self
    }

    /// The result that an operand is added to, if it is one that is added.
    pub fn added_to(&self, operand: usize) -> Option<usize> {
        self.addends.iter().find(|(added, _)| *added == operand).map(|&(_, result)| result)
    }

    fn mark(mut self, names: &str, kind: FactorKind) -> Self {
        for name in names.split_whitespace() {
            for factor in self.factors.iter_mut().filter(|f| f.name == name) {
                factor.kind = kind;
            }
        }
        self
    }

    /// Checks the types of an instruction and returns what each factor is sharded by.
    ///
    /// Fails with the reason in terms of operands, axes and factors; the verifier adds the
    /// instruction and its types.
    pub fn check(
        &self,
        mesh: &Mesh,
        inputs: &[&TensorType],
        outputs: &[&TensorType],
    ) -> Result<Vec<Sharding>, RuleError> {
        let extents = self.extents(inputs, outputs)?;
        let check = Check { rule: self, mesh, extents: &extents };
        check.types(&layouts(inputs), &layouts(outputs))
    }

    /// The layouts and padded extents that the results have for these operands; a factor that only
    /// results have stays replicated and is not padded.
    pub fn infer(
        &self,
        mesh: &Mesh,
        inputs: &[&TensorType],
    ) -> Result<Vec<(Layout, Vec<usize>)>, RuleError> {
        let extents = self.extents(inputs, &[])?;
        let check = Check { rule: self, mesh, extents: &extents };
        let results = check.results(&layouts(inputs))?.into_iter().enumerate();
        results.map(|(i, layout)| Ok((layout, self.padded(i, &extents)?))).collect()
    }
}

fn layouts<'a>(types: &[&'a TensorType]) -> Vec<&'a Layout> {
    types.iter().map(|t| &t.layout).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Types of the shapes that a side of the rule has, in these layouts.
    fn types(rule: &Rule, side: &[Vec<Dim>], mesh: &Mesh, layouts: &[&str]) -> Vec<TensorType> {
        let size = |dim: &Dim| dim.iter().map(|&f| rule.factors[f].size).product::<usize>();
        (side.iter().zip(layouts))
            .map(|(dims, text)| {
                let ty = TensorType::new(DType::F32, dims.iter().map(size).collect::<Vec<_>>());
                ty.with_layout(Layout::parse(text, dims.len(), mesh).unwrap())
            })
            .collect()
    }

    fn infer(rule: &Rule, mesh: &Mesh, layouts: &[&str]) -> Result<Vec<String>, RuleError> {
        let types = types(rule, &rule.inputs, mesh, layouts);
        let refs: Vec<&TensorType> = types.iter().collect();
        Ok(rule.infer(mesh, &refs)?.iter().map(|(layout, _)| layout.to_string()).collect())
    }

    fn matmul() -> Rule {
        Rule::declare("b s d, d e -> b s e", &[&[8, 16, 32], &[32, 64]], &[&[8, 16, 64]])
            .linear(&[&[0], &[1]])
    }

    #[test]
    fn a_contracted_shard_gives_a_partial_sum() {
        let mesh: Mesh = "dp=2 tp=4".parse().unwrap();
        let got = infer(&matmul(), &mesh, &["0:dp 2:tp", "0:tp"]).unwrap();
        assert_eq!(got, ["{0:dp P:tp}"]);
        let got = infer(&matmul(), &mesh, &["0:dp", "1:tp"]).unwrap();
        assert_eq!(got, ["{0:dp 2:tp}"]);
    }

    #[test]
    fn partial_operands_must_form_one_linear_group() {
        let mesh: Mesh = "a=2 b=2".parse().unwrap();
        let got = infer(&matmul(), &mesh, &["P:a", "P:b"]).unwrap();
        assert_eq!(got, ["{P:a,b}"]);
        let error = infer(&matmul(), &mesh, &["P:a", "P:a"]).unwrap_err();
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
        let error = infer(&rule, &mesh, &["2:tp", ""]).unwrap_err();
        assert!(matches!(error, RuleError::Straddle { left: 2, size: 4, .. }), "{error:?}");
        let split = mesh.split("tp", &[2, 2]).unwrap();
        let got = infer(&rule, &split, &["2:tp", "2:tp.0"]).unwrap();
        assert_eq!(got, ["{2:tp.0,tp.1}"]);
    }

    #[test]
    fn a_result_keeps_the_axes_of_a_minor_factor_only_behind_an_exhausted_major_one() {
        let mesh: Mesh = "a=2 b=2 tp=8 one=1".parse().unwrap();
        let merge = Rule::declare("x y -> (x y)", &[&[8, 16]], &[&[128]]);
        assert_eq!(infer(&merge, &mesh, &["0:tp"]).unwrap(), ["{0:tp}"]);
        assert_eq!(infer(&merge, &mesh, &["0:tp 1:a"]).unwrap(), ["{0:tp,a}"]);
        assert_eq!(infer(&merge, &mesh, &["0:a 1:one"]).unwrap(), ["{0:a,one}"]);
        for layout in ["1:tp", "1:a", "0:a 1:b"] {
            let error = infer(&merge, &mesh, &[layout]).unwrap_err();
            assert!(matches!(error, RuleError::Minor { operand: Some(0), .. }), "{error:?}");
            // A declared result is not accepted either.
            let ins = types(&merge, &merge.inputs, &mesh, &[layout]);
            let outs = types(&merge, &merge.outputs, &mesh, &["0:tp"]);
            assert!(merge.check(&mesh, &[&ins[0]], &[&outs[0]]).is_err());
        }
    }

    #[test]
    fn shards_divide_every_factor() {
        let mesh: Mesh = "a=2 b=3".parse().unwrap();
        let split = Rule::declare("(x y) -> x y", &[&[10]], &[&[2, 5]]);
        let uneven = |layout: &str, expected: Option<usize>| {
            let error = infer(&split, &mesh, &[layout]).unwrap_err();
            let RuleError::Uneven { size: 3, padded, .. } = error else { panic!("{error:?}") };
            assert_eq!(padded, expected, "{layout}");
        };
        // The major factor may be padded, the minor one not.
        uneven("0:b", Some(3));
        uneven("0:a,b", None);
        let plain = Rule::declare("x -> x", &[&[5]], &[&[5]]);
        let error = infer(&plain, &mesh, &["0:a"]).unwrap_err();
        assert!(matches!(error, RuleError::Uneven { padded: Some(6), .. }), "{error:?}");
    }

    #[test]
    fn the_order_comes_from_the_factor_that_carries_axes() {
        let mesh: Mesh = "a=2".parse().unwrap();
        let merge = Rule::declare("x y -> (x y)", &[&[1, 16]], &[&[16]]);
        assert_eq!(infer(&merge, &mesh, &["1:a@zigzag"]).unwrap(), ["{0:a@zigzag}"]);
        let merge = Rule::declare("x y -> (x y)", &[&[8, 16]], &[&[128]]);
        let error = infer(&merge, &mesh, &["0:a@striped"]).unwrap_err();
        assert!(matches!(error, RuleError::Order { .. }), "{error:?}");
        // After a fully sharded major factor, a minor one may have axes, but not its own order.
        let both: Mesh = "a=2 b=8".parse().unwrap();
        let error = infer(&merge, &both, &["0:b 1:a@zigzag"]).unwrap_err();
        assert!(matches!(error, RuleError::Order { .. }), "{error:?}");
        let split = Rule::declare("(x y) -> x y", &[&[128]], &[&[8, 16]]);
        let error = infer(&split, &mesh, &["0:a@striped"]).unwrap_err();
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
