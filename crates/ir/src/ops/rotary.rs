//! Rotary position embedding (Su et al., 2021), in the half-split form of LLaMA.

use std::fmt;
use std::str::FromStr;

use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// How frequencies are changed for contexts longer than those of pre-training.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeScaling {
    /// Not changed.
    None,
    /// All divided by the factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// LLaMA 3's rule: long wavelengths are divided, short ones kept, those between blended.
    Llama3 {
        /// The factor by which long wavelengths are divided.
        factor: f64,
        /// Wavelengths above `original / low` are long.
        low: f64,
        /// Wavelengths below `original / high` are short.
        high: f64,
        /// The context of pre-training.
        original: f64,
    },
}

/// Rotates the pairs `(i, i + d/2)` of each head by position × frequency: operand
/// `[batch, sequence, heads, d]`. Positions are the global indices of dim 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rotary {
    /// The base of the frequencies.
    pub theta: f64,
    /// How they are scaled.
    pub scaling: RopeScaling,
    /// Rotates backwards: the gradient.
    pub inverse: bool,
}

impl Rotary {
    /// The angle per position of each pair, for heads of `d` elements.
    pub fn frequencies(&self, d: usize) -> Vec<f64> {
        let plain = (0..d / 2).map(|i| self.theta.powf(-2.0 * i as f64 / d as f64));
        plain.map(|f| self.scaling.apply(f)).collect()
    }
}

impl RopeScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                let wavelength = std::f64::consts::TAU / frequency;
                if wavelength < original / high {
                    frequency
                } else if wavelength > original / low {
                    frequency / factor
                } else {
                    let blend = (original / wavelength - low) / (high - low);
                    (1.0 - blend) * frequency / factor + blend * frequency
                }
            }
        }
    }
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RopeScaling::None => f.write_str("none"),
            RopeScaling::Linear { factor } => write!(f, "linear:{factor}"),
            RopeScaling::Llama3 { factor, low, high, original } => {
                write!(f, "llama3:{factor}:{low}:{high}:{original}")
            }
        }
    }
}

impl FromStr for RopeScaling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let kind = parts.next().expect("a split text has a first part");
        let numbers: Vec<f64> =
            parts.map(str::parse).collect::<Result<_, _>>().map_err(|e| format!("{text}: {e}"))?;
        match (kind, numbers[..].as_ref()) {
            ("none", []) => Ok(RopeScaling::None),
            ("linear", &[factor]) => Ok(RopeScaling::Linear { factor }),
            ("llama3", &[factor, low, high, original]) => {
                Ok(RopeScaling::Llama3 { factor, low, high, original })
            }
            _ => Err(format!("`{text}` is not none, linear:F or llama3:F:LOW:HIGH:CONTEXT")),
        }
    }
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<Rotary, String> {
    Ok(Rotary {
        theta: attrs.take("theta")?,
        scaling: attrs.take("scaling")?,
        inverse: attrs.take("inverse")?,
    })
}

impl OpDef for Rotary {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new()
            .with("theta", self.theta)
            .with("scaling", self.scaling)
            .with("inverse", self.inverse)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        match ins[0].shape[..] {
            [_, _, _, d] if d % 2 == 0 && ins[0].dtype.is_float() => {}
            _ => {
                return Err(format!(
                    "operand is {}, expected floats [batch, sequence, heads, even size]",
                    ins[0]
                ));
            }
        }
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("b s h d -> b s h d", ins, outs).whole("d").linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        g.set_to(0, Rotary { inverse: !self.inverse, ..*self }, &[g.dy()?])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }
}
