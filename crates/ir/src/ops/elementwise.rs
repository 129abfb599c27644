//! Ops that compute each element from the elements at the same place.
//!
//! Operands with fewer dims align at the right and are repeated along the leading dims, so a bias
//! or a scalar needs no explicit broadcast.

use super::{Op, OpDef, Shaped, arity};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Functions of one argument.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum UnaryKind {
    Neg,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Recip,
    Square,
    Tanh,
    Sigmoid,
    Relu,
    /// GELU by its tanh approximation, as in GPT-2.
    Gelu,
    /// GELU by the error function.
    GeluErf,
    Silu,
}

impl UnaryKind {
    /// Every kind.
    pub const ALL: [UnaryKind; 13] = [
        UnaryKind::Neg,
        UnaryKind::Exp,
        UnaryKind::Log,
        UnaryKind::Sqrt,
        UnaryKind::Rsqrt,
        UnaryKind::Recip,
        UnaryKind::Square,
        UnaryKind::Tanh,
        UnaryKind::Sigmoid,
        UnaryKind::Relu,
        UnaryKind::Gelu,
        UnaryKind::GeluErf,
        UnaryKind::Silu,
    ];

    const fn names(self) -> [&'static str; 2] {
        match self {
            UnaryKind::Neg => ["neg", "neg_grad"],
            UnaryKind::Exp => ["exp", "exp_grad"],
            UnaryKind::Log => ["log", "log_grad"],
            UnaryKind::Sqrt => ["sqrt", "sqrt_grad"],
            UnaryKind::Rsqrt => ["rsqrt", "rsqrt_grad"],
            UnaryKind::Recip => ["recip", "recip_grad"],
            UnaryKind::Square => ["square", "square_grad"],
            UnaryKind::Tanh => ["tanh", "tanh_grad"],
            UnaryKind::Sigmoid => ["sigmoid", "sigmoid_grad"],
            UnaryKind::Relu => ["relu", "relu_grad"],
            UnaryKind::Gelu => ["gelu", "gelu_grad"],
            UnaryKind::GeluErf => ["gelu_erf", "gelu_erf_grad"],
            UnaryKind::Silu => ["silu", "silu_grad"],
        }
    }
}

/// Functions of two arguments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum BinaryKind {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

/// Comparisons; the result is `bool`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum CompareKind {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// A function of one argument.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Unary {
    /// Which one.
    pub kind: UnaryKind,
}

/// The derivative of a function at `x`, times `dy`: operands x, dy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct UnaryGrad {
    /// The function differentiated.
    pub kind: UnaryKind,
}

/// A function of two arguments; the second may have fewer dims.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Binary {
    /// Which one.
    pub kind: BinaryKind,
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

/// Reads the ops of this file, whose names are their kinds.
pub(super) fn read(name: &str, attrs: &mut AttrReader) -> Option<Result<Op, String>> {
    for kind in UnaryKind::ALL {
        let [plain, grad] = kind.names();
        if name == plain {
            return Some(Ok(Unary { kind }.into()));
        }
        if name == grad {
            return Some(Ok(UnaryGrad { kind }.into()));
        }
    }
    let binary = |kind| Some(Ok(Binary { kind }.into()));
    let compare = |kind| Some(Ok(Compare { kind }.into()));
    match name {
        "add" => binary(BinaryKind::Add),
        "sub" => binary(BinaryKind::Sub),
        "mul" => binary(BinaryKind::Mul),
        "div" => binary(BinaryKind::Div),
        "max" => binary(BinaryKind::Max),
        "min" => binary(BinaryKind::Min),
        "eq" => compare(CompareKind::Eq),
        "ne" => compare(CompareKind::Ne),
        "lt" => compare(CompareKind::Lt),
        "le" => compare(CompareKind::Le),
        "gt" => compare(CompareKind::Gt),
        "ge" => compare(CompareKind::Ge),
        "select" => Some(Ok(Select.into())),
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

/// The element type and shape of an op whose operands must agree, the first being the largest.
fn same(ins: &[&TensorType]) -> Result<Shaped, String> {
    let first = ins[0];
    for other in &ins[1..] {
        if other.dtype != first.dtype || !first.shape.ends_with(&other.shape) {
            return Err(format!(
                "operands are {first} and {other}; element types must be equal and the second \
                 shape a suffix of the first (cast, reshape or swap them)"
            ));
        }
    }
    Ok((first.dtype, first.shape.clone()))
}

fn float(ins: &[&TensorType]) -> Result<(), String> {
    match ins.iter().find(|ty| !ty.dtype.is_float()) {
        None => Ok(()),
        Some(ty) => Err(format!("operand is {ty}, expected a float (cast it first)")),
    }
}

impl OpDef for Unary {
    fn name(&self) -> &'static str {
        self.kind.names()[0]
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 1)?;
        float(ins)?;
        Ok(vec![same(ins)?])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let rule = Rule::elementwise(ins, outs);
        if self.kind == UnaryKind::Neg { rule.linear(&[&[0]]) } else { rule }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dx = g.emit(UnaryGrad { kind: self.kind }, &[g.input(0), g.dy()?])?;
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

impl OpDef for UnaryGrad {
    fn name(&self) -> &'static str {
        self.kind.names()[1]
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 2)?;
        float(ins)?;
        super::shape_is("dy", ins[1], &ins[0].shape)?;
        Ok(vec![same(ins)?])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs).linear(&[&[1]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(1, 0), (0, 0)]
    }
    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}

impl OpDef for Binary {
    fn name(&self) -> &'static str {
        match self.kind {
            BinaryKind::Add => "add",
            BinaryKind::Sub => "sub",
            BinaryKind::Mul => "mul",
            BinaryKind::Div => "div",
            BinaryKind::Max => "max",
            BinaryKind::Min => "min",
        }
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 2)?;
        Ok(vec![same(ins)?])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let rule = Rule::elementwise(ins, outs);
        match self.kind {
            BinaryKind::Add | BinaryKind::Sub => rule.linear(&[&[0, 1]]),
            BinaryKind::Mul => rule.linear(&[&[0], &[1]]),
            BinaryKind::Div => rule.linear(&[&[0]]),
            BinaryKind::Max | BinaryKind::Min => rule,
        }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (a, b, dy) = (g.input(0), g.input(1), g.dy()?);
        let binary = |kind| Binary { kind };
        match self.kind {
            BinaryKind::Add | BinaryKind::Sub => {
                if g.wants(0) {
                    g.set(0, dy)?;
                }
                if g.wants(1) {
                    let db = match self.kind {
                        BinaryKind::Sub => g.emit(Scale { by: -1.0 }, &[dy])?,
                        _ => dy,
                    };
                    g.set(1, db)?;
                }
            }
            BinaryKind::Mul => {
                if g.wants(0) {
                    let da = g.emit(binary(BinaryKind::Mul), &[dy, b])?;
                    g.set(0, da)?;
                }
                if g.wants(1) {
                    let db = g.emit(binary(BinaryKind::Mul), &[dy, a])?;
                    g.set(1, db)?;
                }
            }
            BinaryKind::Div => {
                let da = g.emit(binary(BinaryKind::Div), &[dy, b])?;
                if g.wants(0) {
                    g.set(0, da)?;
                }
                if g.wants(1) {
                    let y = g.output(0);
                    let product = g.emit(binary(BinaryKind::Mul), &[da, y])?;
                    let db = g.emit(Scale { by: -1.0 }, &[product])?;
                    g.set(1, db)?;
                }
            }
            BinaryKind::Max | BinaryKind::Min => self.extremum_vjp(g)?,
        }
        Ok(())
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 0)]
    }
    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}

impl Binary {
    /// The gradient goes to the operand that was taken; where both are equal, to the first.
    fn extremum_vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (a, b, dy) = (g.input(0), g.input(1), g.dy()?);
        let kind = match self.kind {
            BinaryKind::Max => CompareKind::Ge,
            _ => CompareKind::Le,
        };
        let first = g.emit(Compare { kind }, &[a, b])?;
        let zero = g.constant_like(dy, 0.0)?;
        if g.wants(0) {
            let da = g.emit(Select, &[first, dy, zero])?;
            g.set(0, da)?;
        }
        if g.wants(1) {
            let db = g.emit(Select, &[first, zero, dy])?;
            g.set(1, db)?;
        }
        Ok(())
    }
}

impl OpDef for Compare {
    fn name(&self) -> &'static str {
        match self.kind {
            CompareKind::Eq => "eq",
            CompareKind::Ne => "ne",
            CompareKind::Lt => "lt",
            CompareKind::Le => "le",
            CompareKind::Gt => "gt",
            CompareKind::Ge => "ge",
        }
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
        super::dtype_is("the condition", ins[0], DType::Bool)?;
        super::shape_is("the condition", ins[0], &ins[1].shape)?;
        super::shape_is("the third operand", ins[2], &ins[1].shape)?;
        Ok(vec![same(&ins[1..])?])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs).linear(&[&[1, 2]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (condition, dy) = (g.input(0), g.dy()?);
        let zero = g.constant_like(dy, 0.0)?;
        if g.wants(1) {
            let da = g.emit(Select, &[condition, dy, zero])?;
            g.set(1, da)?;
        }
        if g.wants(2) {
            let db = g.emit(Select, &[condition, zero, dy])?;
            g.set(2, db)?;
        }
        Ok(())
    }
    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}

impl OpDef for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("by", self.by)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 1)?;
        Ok(vec![same(ins)?])
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

impl OpDef for Shift {
    fn name(&self) -> &'static str {
        "shift"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("by", self.by)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 1)?;
        Ok(vec![same(ins)?])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dy = g.dy()?;
        g.set(0, dy)
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

impl OpDef for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("to", self.to)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        arity(ins, 1)?;
        Ok(vec![(self.to, ins[0].shape.clone())])
    }

    /// Rounding is not linear, yet a partial sum may be cast: its parts are then summed in the
    /// new type, which is what a reduction in 16 bit means.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dy = g.dy()?;
        g.set(0, dy)
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
