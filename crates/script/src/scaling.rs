//! Loss scaling, for float types with few exponent bits.
//!
//! Gradients of f16 programs may be too small for the type. So the backward starts from a loss that is
//! multiplied by a scale, and updates divide by it. If a gradient becomes too large instead, the step
//! changes nothing. A dynamic scale is halved then, and doubled after many good steps: the rule of
//! DeepSpeed's `DynamicLossScaler`, whose field names the configuration has.

use crate::key::Scalar;

/// How losses are scaled.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScaling {
    /// The scale of the first step.
    pub initial: f64,
    /// How it changes; none: never.
    pub rule: Option<ScaleRule>,
}

/// How a dynamic scale changes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ScaleRule {
    /// Good steps in a row after which the scale is doubled.
    pub window: u64,
    /// The scale is halved by this overflow since it was last doubled, and by each one after it.
    pub hysteresis: u64,
    /// The scale never falls below this.
    pub least: f64,
}

impl LossScaling {
    /// A dynamic scale with the usual constants.
    pub const fn dynamic() -> Self {
        let rule = ScaleRule { window: 1000, hysteresis: 2, least: 1.0 };
        Self { initial: 65536.0, rule: Some(rule) }
    }

    /// The numbers that every rank keeps, with their first values.
    pub fn scalars(&self) -> [(Scalar, f64); 4] {
        let tolerated = match self.rule {
            Some(rule) => rule.hysteresis,
            // A scale that never changes tolerates nothing and everything.
            None => 1,
        };
        [
            (Scalar::LossScale, self.initial),
            (Scalar::GoodSteps, 0.0),
            (Scalar::Hysteresis, tolerated as f64),
            (Scalar::Applied, 0.0),
        ]
    }
}
