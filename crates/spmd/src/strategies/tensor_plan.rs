//! Tensor parallelism by name: the user says which weights are split, and how.
//!
//! [`Megatron`](super::Megatron) finds the roles of weights in what the program does with them. For a
//! block that it does not know, or where a split should be seen in the code, a plan names them, as
//! PyTorch's `parallelize_module` does. Weights that no rule names are whole on every rank. Activations
//! follow from the weights by propagation, and so do the collectives between them, so a plan can be slow
//! but not wrong. It costs what its splits cost: after columns and rows in turn one all-reduce of the
//! activations, there and back.

use phalanx_ir::{Model, Op, Program, Role, ValueId};

use super::find::readers;
use super::{Precedence, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;

/// How a weight is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// By output features. A bias is split along its only dim.
    Columns,
    /// By input features; of an embedding, the vocabulary. A bias stays whole: it is added to the sum.
    Rows,
    /// Along this dim.
    Dim(usize),
}

/// Weights on an axis, by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPlan {
    /// The axis.
    pub axis: String,
    /// What names a parameter within its segment, and how it is split; the first that fits holds.
    rules: Vec<(String, Cut)>,
}

impl TensorPlan {
    /// A plan for an axis that splits nothing yet.
    pub fn new(axis: impl Into<String>) -> Self {
        Self { axis: axis.into(), rules: Vec::new() }
    }

    /// Splits parameters by output features. A name is the one that the segment's builder was given,
    /// such as `attn.q`; `*` stands for any letters.
    pub fn columns(self, name: impl Into<String>) -> Self {
        self.cut(name, Cut::Columns)
    }

    /// Splits parameters by input features.
    pub fn rows(self, name: impl Into<String>) -> Self {
        self.cut(name, Cut::Rows)
    }

    /// Splits parameters in one of these ways.
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
                "{}: no parameter is called `{pattern}`\n  usual fix: one of {}; `*` stands for any letters",
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

/// The dim of a weight that its products sum over; of what no product reads, the first.
fn input_dim(program: &Program, param: ValueId) -> usize {
    let summed = |op: &Op| match op {
        Op::Matmul(m) => {
            let [_, weight, result] = m.spec.letters();
            weight.find(|letter| !result.contains(letter))
        }
        _ => None,
    };
    let mut products = readers(program, param).filter(|i| i.inputs.get(1) == Some(&param));
    products.find_map(|i| summed(&i.op)).unwrap_or(0)
}

/// Whether a name is what a pattern describes, in which `*` stands for any letters.
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
