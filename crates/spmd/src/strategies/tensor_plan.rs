//! Tensor parallelism by name: the user says which weights are split, and how.
//!
//! [`Megatron`](super::Megatron) derives the roles of weights from the program. For a block that it
//! does not know, or to make a split visible in the code, a plan names the weights, as PyTorch's
//! `parallelize_module` does. Weights that no rule names are whole on every rank. The layouts of
//! activations and the collectives follow from the weights by propagation, so a plan can be slow
//! but not wrong. Its cost is that of its splits: for columns followed by rows, one all-reduce of
//! the activations in the forward and one in the backward.

use phalanx_ir::{Model, Op, Program, Role, ValueId};

use super::find::readers;
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// How a weight is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Along the output features. A bias is split along its only dim.
    Columns,
    /// Along the input features; for an embedding, along the vocabulary. A bias is not split: it is
    /// added after the sum.
    Rows,
    /// Along this dim.
    Dim(usize),
}

/// How weights are split on an axis, by parameter name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPlan {
    /// The axis.
    pub axis: String,
    /// A name pattern for parameters of a segment, and how they are split; the first match applies.
    rules: Vec<(String, Cut)>,
}

impl TensorPlan {
    /// A plan for an axis that splits nothing yet.
    pub fn new(axis: impl Into<String>) -> Self {
        Self { axis: axis.into(), rules: Vec::new() }
    }

    /// Splits parameters by output features. A name is the one that the segment's builder was
    /// given, such as `attn.q`; `*` matches any text.
    pub fn columns(self, name: impl Into<String>) -> Self {
        self.cut(name, Cut::Columns)
    }

    /// Splits parameters by input features.
    pub fn rows(self, name: impl Into<String>) -> Self {
        self.cut(name, Cut::Rows)
    }

    /// Splits parameters in the given way.
    pub fn cut(mut self, name: impl Into<String>, cut: Cut) -> Self {
        self.rules.push((name.into(), cut));
        self
    }

    fn of(&self, name: &str) -> Option<Cut> {
        let found = self.rules.iter().find(|(pattern, _)| fits(pattern, name));
        found.map(|(_, cut)| *cut)
    }
}

impl Strategy for TensorPlan {
    fn name(&self) -> &'static str {
        "tensor plan"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn place(&self) -> Precedence {
        Precedence::Weights
    }

    fn check(&self, model: &Model) -> Result<(), SpmdError> {
        let params = || model.segments().iter().flat_map(|s| s.inputs_with(Role::Param));
        let Some((pattern, _)) =
            self.rules.iter().find(|(pattern, _)| !params().any(|p| fits(pattern, &p.name)))
        else {
            return Ok(());
        };
        let mut names: Vec<&str> = params().map(|port| port.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Err(SpmdError::Strategy {
            segment: model.name.clone(),
            what: format!(
                "{}: no parameter matches `{pattern}`\n  usual fix: one of {}; `*` matches any \
                text",
                self.name(),
                names.join(", ")
            ),
        })
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        if ctx.degree(&self.axis) == 1 {
            return Ok(());
        }
        let program = ctx.program();
        for param in ctx.params() {
            let cut = self.of(&param.name);
            match cut.map(|cut| dim(program, param.value, cut)) {
                None | Some(None) => ctx.replicate(param.value, &self.axis)?,
                Some(Some(dim)) => ctx.shard(param.value, dim, &self.axis)?,
            }
        }
        Ok(())
    }
}

/// The dim that is split, if one is.
fn dim(program: &Program, param: ValueId, cut: Cut) -> Option<usize> {
    let (last, rows) = (program.ty(param).shape.len().checked_sub(1)?, input_dim(program, param));
    match cut {
        Cut::Dim(dim) => Some(dim),
        Cut::Columns if last == 0 => Some(0),
        Cut::Rows if last == 0 => None,
        Cut::Columns => Some(if rows == last { 0 } else { last }),
        Cut::Rows => Some(rows),
    }
}

/// The dim of a weight that its matrix products sum over; the first dim if no product reads it.
fn input_dim(program: &Program, param: ValueId) -> usize {
    let summed = |op: &Op| match op {
        Op::Matmul(m) => {
            let [_, weight, result] = m.spec.letters();
            weight.find(|letter| !result.contains(letter))
        }
        // Weights are [expert, in, out].
        Op::GroupedMatmul(m) => Some(if m.transposed { 2 } else { 1 }),
        // Weights are [height, width, in, out].
        Op::Conv2d(_) => Some(2),
        _ => None,
    };
    let mut products = readers(program, param).filter(|i| i.inputs.get(1) == Some(&param));
    products.find_map(|i| summed(&i.op)).unwrap_or(0)
}

/// Whether a name matches a pattern, in which `*` matches any text.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => {
            let Some(tail) = name.strip_prefix(start) else { return false };
            (0..=tail.len()).any(|at| tail.is_char_boundary(at) && fits(rest, &tail[at..]))
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::{Builder, DType};

    use super::*;

    #[test]
    fn a_star_stands_for_any_letters() {
        for (pattern, name, expected) in [
            ("attn.q", "attn.q", true),
            ("attn.q", "attn.qk", false),
            ("attn.*", "attn.out", true),
            ("*.q", "attn.q", true),
            ("*", "", true),
            ("a*b*c", "a--b-c", true),
            ("a*b*c", "a--c-b", false),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn columns_and_rows_follow_from_the_product() {
        let b = Builder::new("block", DType::F32);
        let x = b.data("x", DType::F32, [2, 4]);
        let y = x.matmul(b.param("up", [4, 8])) + b.param("bias", [8]);
        b.probe("y", y.matmul_transposed(b.param("down", [4, 8])));
        let program = b.finish().unwrap();
        let of = |name: &str, cut| dim(&program, program.input_named(name).unwrap().value, cut);
        assert_eq!([of("up", Cut::Columns), of("up", Cut::Rows)], [Some(1), Some(0)]);
        assert_eq!([of("down", Cut::Columns), of("down", Cut::Rows)], [Some(0), Some(1)]);
        assert_eq!([of("bias", Cut::Columns), of("bias", Cut::Rows)], [Some(0), None]);
    }
}
