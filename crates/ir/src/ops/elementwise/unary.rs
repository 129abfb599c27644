//! Functions of one argument, and their derivatives.

use super::super::{Op, Shaped, shape_is};
use super::{Elementwise, kinds, same};
use crate::error::IrError;
use crate::types::TensorType;
use crate::vjp::Vjp;

// The second name is the derivative's.
kinds! {
    /// Functions of one argument.
    UnaryKind: [&'static str; 2] {
        Neg = ["neg", "neg_grad"],
        Exp = ["exp", "exp_grad"],
        Log = ["log", "log_grad"],
        Sqrt = ["sqrt", "sqrt_grad"],
        Rsqrt = ["rsqrt", "rsqrt_grad"],
        Recip = ["recip", "recip_grad"],
        Square = ["square", "square_grad"],
        Tanh = ["tanh", "tanh_grad"],
        Sigmoid = ["sigmoid", "sigmoid_grad"],
        Relu = ["relu", "relu_grad"],
        /// GELU by its tanh approximation, as in GPT-2.
        Gelu = ["gelu", "gelu_grad"],
        /// GELU by the error function.
        GeluErf = ["gelu_erf", "gelu_erf_grad"],
        Silu = ["silu", "silu_grad"],
        /// log(1 + e^x).
        Softplus = ["softplus", "softplus_grad"],
    }
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

pub(super) fn read(name: &str) -> Option<Op> {
    for kind in UnaryKind::ALL {
        let [plain, grad] = kind.text();
        if name == plain {
            return Some(Unary { kind }.into());
        }
        if name == grad {
            return Some(UnaryGrad { kind }.into());
        }
    }
    None
}

fn float(ins: &[&TensorType]) -> Result<(), String> {
    match ins.iter().find(|ty| !ty.dtype.is_float()) {
        None => Ok(()),
        Some(ty) => Err(format!("operand is {ty}, expected a float (cast it first)")),
    }
}

impl Elementwise for Unary {
    const ARITY: usize = 1;

    fn name(&self) -> &'static str {
        self.kind.text()[0]
    }

    fn results(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        float(ins)?;
        Ok(vec![same(ins)?])
    }

    fn linear(&self) -> &'static [&'static [usize]] {
        if self.kind == UnaryKind::Neg { &[&[0]] } else { &[] }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        g.set_to(0, UnaryGrad { kind: self.kind }, &[g.input(0), g.dy()?])
    }
}

impl Elementwise for UnaryGrad {
    const ARITY: usize = 2;

    fn name(&self) -> &'static str {
        self.kind.text()[1]
    }

    fn results(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        float(ins)?;
        shape_is("dy", ins[1], &ins[0].shape)?;
        Ok(vec![same(ins)?])
    }

    fn linear(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(1, 0), (0, 0)]
    }
}
