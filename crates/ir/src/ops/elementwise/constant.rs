//! Ops whose attribute is a constant: scaling, shifting, casting, filling.

use super::super::{Op, OpDef, Shaped, arity};
use super::Elementwise;
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Multiplication by a constant.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scale {
    /// The constant.
    pub by: f64,
}

/// Addition of a constant.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shift {
    /// The constant.
    pub by: f64,
}

/// Conversion to another element type: to floats rounding to nearest even, to `i32` towards zero
/// (saturating, and NaN gives 0), to `bool` by whether it differs from zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cast {
    /// The result's element type.
    pub to: DType,
}

/// A constant tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Fill {
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: Vec<usize>,
    /// Every element.
    pub value: f64,
}

pub(super) fn read(name: &str, attrs: &mut AttrReader) -> Option<Result<Op, String>> {
    match name {
        "scale" => Some(attrs.take("by").map(|by| Scale { by }.into())),
        "shift" => Some(attrs.take("by").map(|by| Shift { by }.into())),
        "cast" => Some(attrs.take("to").map(|to| Cast { to }.into())),
        "fill" => Some(read_fill(attrs).map(Op::from)),
        _ => None,
    }
}

fn read_fill(attrs: &mut AttrReader) -> Result<Fill, String> {
    Ok(Fill {
        dtype: attrs.take("dtype")?,
        shape: attrs.take_list("shape")?,
        value: attrs.take("value")?,
    })
}

impl Elementwise for Scale {
    const ARITY: usize = 1;

    fn name(&self) -> &'static str {
        "scale"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("by", self.by)
    }

    fn linear(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        g.set_to(0, *self, &[g.dy()?])
    }
}

impl Elementwise for Shift {
    const ARITY: usize = 1;

    fn name(&self) -> &'static str {
        "shift"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("by", self.by)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dy = g.dy()?;
        g.set(0, dy)
    }
}

impl Elementwise for Cast {
    const ARITY: usize = 1;

    fn name(&self) -> &'static str {
        "cast"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("to", self.to)
    }

    fn results(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        Ok(vec![(self.to, ins[0].shape.clone())])
    }

    /// Rounding is not linear, yet a partial sum may be cast: its summands are then summed in the
    /// new type, as in a 16-bit reduction.
    fn linear(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dy = g.dy()?;
        g.set(0, dy)
    }
}

impl OpDef for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dtype", self.dtype).list("shape", &self.shape).with("value", self.value)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 0)?;
        Ok(vec![(self.dtype, self.shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs)
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}
