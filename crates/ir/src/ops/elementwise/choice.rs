//! Comparisons, and selecting between two values by a condition. They work neither in place nor on
//! units.

use super::super::{Op, OpDef, Shaped, arity, dtype_is, shape_is};
use super::{kinds, same};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

kinds! {
    /// Comparisons; the result is `bool`.
    CompareKind: &'static str {
        Eq = "eq",
        Ne = "ne",
        Lt = "lt",
        Le = "le",
        Gt = "gt",
        Ge = "ge",
    }
}

/// A comparison of two values of one type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Compare {
    /// Which one.
    pub kind: CompareKind,
}

/// `condition ? a : b`, operands condition, a, b of one shape.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Select;

pub(super) fn read(name: &str) -> Option<Op> {
    if name == "select" {
        return Some(Select.into());
    }
    let kind = CompareKind::ALL.into_iter().find(|kind| kind.text() == name)?;
    Some(Compare { kind }.into())
}

impl OpDef for Compare {
    fn name(&self) -> &'static str {
        self.kind.text()
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 2)?;
        Ok(vec![(DType::Bool, same(ins)?.1)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs)
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}

impl OpDef for Select {
    fn name(&self) -> &'static str {
        "select"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 3)?;
        dtype_is("the condition", ins[0], DType::Bool)?;
        shape_is("the condition", ins[0], &ins[1].shape)?;
        shape_is("the third operand", ins[2], &ins[1].shape)?;
        Ok(vec![same(&ins[1..])?])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs).linear(&[&[1, 2]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (condition, dy) = (g.input(0), g.dy()?);
        let zero = g.constant_like(dy, 0.0)?;
        g.set_to(1, Select, &[condition, dy, zero])?;
        g.set_to(2, Select, &[condition, zero, dy])
    }

    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}
