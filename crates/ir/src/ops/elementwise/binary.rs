//! Arithmetic of two arguments.

use super::super::Op;
use super::{Compare, CompareKind, Elementwise, Scale, Select, kinds};
use crate::error::IrError;
use crate::vjp::Vjp;

kinds! {
    /// Functions of two arguments.
    BinaryKind: &'static str {
        Add = "add",
        Sub = "sub",
        Mul = "mul",
        Div = "div",
        Max = "max",
        Min = "min",
    }
}

/// A function of two arguments; the second may have fewer dims.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Binary {
    /// Which function.
    pub kind: BinaryKind,
}

pub(super) fn read(name: &str) -> Option<Op> {
    let kind = BinaryKind::ALL.into_iter().find(|kind| kind.text() == name)?;
    Some(Binary { kind }.into())
}

impl Elementwise for Binary {
    const ARITY: usize = 2;

    fn name(&self) -> &'static str {
        self.kind.text()
    }

    fn linear(&self) -> &'static [&'static [usize]] {
        match self.kind {
            BinaryKind::Add | BinaryKind::Sub => &[&[0, 1]],
            BinaryKind::Mul => &[&[0], &[1]],
            BinaryKind::Div => &[&[0]],
            BinaryKind::Max | BinaryKind::Min => &[],
        }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (a, b, dy) = (g.input(0), g.input(1), g.dy()?);
        let binary = |kind| Binary { kind };
        match self.kind {
            BinaryKind::Add => {
                g.set(0, dy)?;
                g.set(1, dy)
            }
            BinaryKind::Sub => {
                g.set(0, dy)?;
                g.set_to(1, Scale { by: -1.0 }, &[dy])
            }
            BinaryKind::Mul => {
                g.set_to(0, binary(BinaryKind::Mul), &[dy, b])?;
                g.set_to(1, binary(BinaryKind::Mul), &[dy, a])
            }
            BinaryKind::Div => {
                let da = g.emit(binary(BinaryKind::Div), &[dy, b])?;
                g.set(0, da)?;
                if !g.wants(1) {
                    return Ok(());
                }
                let product = g.emit(binary(BinaryKind::Mul), &[da, g.output(0)])?;
                g.set_to(1, Scale { by: -1.0 }, &[product])
            }
            BinaryKind::Max | BinaryKind::Min => self.extremum_vjp(g),
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 0)]
    }
}

impl Binary {
    /// The gradient goes to the operand that was selected; if both are equal, to the first.
    fn extremum_vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (a, b, dy) = (g.input(0), g.input(1), g.dy()?);
        let kind = match self.kind {
            BinaryKind::Max => CompareKind::Ge,
            _ => CompareKind::Le,
        };
        let first = g.emit(Compare { kind }, &[a, b])?;
        let zero = g.constant_like(dy, 0.0)?;
        g.set_to(0, Select, &[first, dy, zero])?;
        g.set_to(1, Select, &[first, zero, dy])
    }
}
