//! Writes zeros into padding.

use super::{OpDef, Shaped};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Its operand with zeros in the padding; valid elements do not change.
///
/// Padding may hold anything, and most kernels do not read it. In a packed unit that is not
/// possible: the elements of several parameters lie in one buffer, and norms and updates read all
/// of it. So gradients of padded parameters first go through this op.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ZeroPadding;

impl OpDef for ZeroPadding {
    fn name(&self) -> &'static str {
        "zero_padding"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dx = g.emit(*self, &[g.dy()?])?;
        g.set(0, dx)
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}
