//! Softmax over the last dim.

use super::{OpDef, Shaped};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// `exp(x − max) / Σ exp(x − max)` over the last dim.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Softmax;

/// `y · (dy − Σ y·dy)`: operands y, dy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SoftmaxGrad;

fn like_first(ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
    let x = ins[0];
    if !x.dtype.is_float() || x.shape.is_empty() {
        return Err(format!("operand is {x}, expected a float with at least one dim"));
    }
    Ok(vec![(x.dtype, x.shape.clone())])
}

impl OpDef for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        like_first(ins)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... d -> ... d", ins, outs).lowered("d")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        g.set_to(0, SoftmaxGrad, &[g.output(0), g.dy()?])
    }

    fn exchanges(&self) -> usize {
        // The maximum and the sum of exponentials relative to it.
        2
    }
}

impl OpDef for SoftmaxGrad {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        super::shape_is("dy", ins[1], &ins[0].shape)?;
        super::dtype_is("dy", ins[1], ins[0].dtype)?;
        like_first(ins)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... d, ... d -> ... d", ins, outs).lowered("d").linear(&[&[1]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn exchanges(&self) -> usize {
        // The sum of y·dy.
        1
    }
}
