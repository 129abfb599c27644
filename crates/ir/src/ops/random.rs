//! Dropout and random numbers, which depend only on the element's global index.

use super::{OpDef, Shaped};
use crate::attr::Attrs;
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Zeroes each element with probability `p` and scales the rest by `1/(1−p)`: operands x, key.
///
/// The mask is a pure function of the key (`i32[5]`: seed low, seed high, step, segment instance,
/// first sample of the micro-batch), the site and the element's index, where the leading dim
/// counts global samples; [`keeps`](crate::random::keeps) defines it. It is never stored: the gradient is the same op on dy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// The probability of zero.
    pub p: f64,
    /// Distinguishes the dropouts of one segment.
    pub site: u32,
}

/// A random number for each element of a value, whose own numbers do not matter: operands x, key. It has no
/// gradient.
///
/// The number is a pure function of the key, the site and the element's index, as a mask of [`Dropout`] is;
/// [`uniform_at`](crate::random::uniform_at) and [`normal_at`](crate::random::normal_at) define it, and it is
/// rounded to the element type, a narrow one through f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Noise {
    /// How numbers are distributed.
    pub kind: NoiseKind,
    /// Distinguishes the random ops of one segment.
    pub site: u32,
}

/// How random numbers are distributed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NoiseKind {
    /// Evenly from zero to one.
    Uniform,
    /// Normally, with the mean zero and the variance one.
    Normal,
}

impl NoiseKind {
    /// Every kind.
    pub const ALL: [NoiseKind; 2] = [NoiseKind::Uniform, NoiseKind::Normal];
}

/// Words of the key that random ops take: seed low, seed high, step, segment instance, first
/// sample of the micro-batch.
pub(super) const KEY_WORDS: usize = 5;

/// Fails unless the operand is a random key.
pub(super) fn key_is(ty: &TensorType) -> Result<(), String> {
    super::dtype_is("the random key", ty, DType::I32)?;
    super::shape_is("the random key", ty, &[KEY_WORDS])
}

/// The rule of an op that treats each element by itself, with a key.
fn by_element(ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
    let names: Vec<String> = (0..ins[0].len()).map(|i| format!("x{i}")).collect();
    let x = names.join(" ");
    Rule::declare(&format!("{x}, key -> {x}"), ins, outs).whole("key")
}

impl OpDef for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("p", self.p).with("site", self.site)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        if !(0.0..1.0).contains(&self.p) {
            return Err(format!("p = {} is not a probability below 1", self.p));
        }
        key_is(ins[1])?;
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        by_element(ins, outs).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        g.set_to(0, *self, &[g.dy()?, g.input(1)])
    }
}

impl OpDef for Noise {
    fn name(&self) -> &'static str {
        match self.kind {
            NoiseKind::Uniform => "uniform",
            NoiseKind::Normal => "normal",
        }
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("site", self.site)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        if !ins[0].dtype.is_float() {
            return Err(format!("operand is {}, expected a float", ins[0]));
        }
        key_is(ins[1])?;
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        by_element(ins, outs)
    }

    fn vjp(&self, _g: &mut Vjp<'_>) -> Result<(), IrError> {
        Ok(())
    }
}
