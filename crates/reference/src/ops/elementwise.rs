//! Functions of elements at the same position. An operand with fewer dims is repeated along the
//! leading ones: in row-major order it is repeated as a whole.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use phalanx_ir::ops::{BinaryKind, CompareKind, UnaryKind};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::{RefTensor, TensorData};

pub(super) fn map(
    call: &Call<'_>,
    f: impl Fn(f64) -> f64,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let y = call.floats(0)?.iter().map(|&x| f(x)).collect();
    Ok(vec![call.result(0, y)])
}

pub(super) fn unary(kind: UnaryKind, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    map(call, |x| value(kind, x))
}

pub(super) fn unary_grad(
    kind: UnaryKind,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, dy) = (call.floats(0)?, call.floats(1)?);
    let dx = (x.iter().zip(dy)).map(|(&x, dy)| slope(kind, x) * dy).collect();
    Ok(vec![call.result(0, dx)])
}

pub(super) fn binary(kind: BinaryKind, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    if let (TensorData::Int(a), TensorData::Int(b)) = (call.ins[0].data(), call.ins[1].data()) {
        let y = (a.iter().zip(b.iter().cycle()))
            .map(|(&a, &b)| integer(kind, a, b))
            .collect::<Option<_>>()
            .ok_or_else(|| call.wrong(1, "a float to divide by"))?;
        return Ok(vec![call.moved(TensorData::Int(y))]);
    }
    let (a, b) = (call.floats(0)?, call.floats(1)?);
    let y = (a.iter().zip(b.iter().cycle()))
        .map(|(&a, &b)| match kind {
            BinaryKind::Add => a + b,
            BinaryKind::Sub => a - b,
            BinaryKind::Mul => a * b,
            BinaryKind::Div => a / b,
            _ if a.is_nan() || b.is_nan() => f64::NAN,
            BinaryKind::Max => a.max(b),
            BinaryKind::Min => a.min(b),
        })
        .collect();
    Ok(vec![call.result(0, y)])
}

pub(super) fn compare(kind: CompareKind, call: &Call<'_>) -> Vec<RefTensor> {
    let (a, b) = (call.ins[0].values(), call.ins[1].values());
    let y = (a.iter().zip(b.iter().cycle()))
        .map(|(a, b)| match kind {
            CompareKind::Eq => a == b,
            CompareKind::Ne => a != b,
            CompareKind::Lt => a < b,
            CompareKind::Le => a <= b,
            CompareKind::Gt => a > b,
            CompareKind::Ge => a >= b,
        })
        .collect();
    vec![call.moved(TensorData::Bool(y))]
}

pub(super) fn select(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let TensorData::Bool(condition) = call.ins[0].data() else {
        return Err(call.wrong(0, "bool"));
    };
    let (a, b) = (call.ins[1].values(), call.ins[2].values());
    let y = (condition.iter().zip(a.iter().zip(&b)))
        .map(|(&condition, (&a, &b))| if condition { a } else { b })
        .collect();
    Ok(vec![call.result(0, y)])
}

/// Integers wrap; integer division differs between languages, so it is not defined here.
fn integer(kind: BinaryKind, a: i32, b: i32) -> Option<i32> {
    match kind {
        BinaryKind::Add => Some(a.wrapping_add(b)),
        BinaryKind::Sub => Some(a.wrapping_sub(b)),
        BinaryKind::Mul => Some(a.wrapping_mul(b)),
        BinaryKind::Div => None,
        BinaryKind::Max => Some(a.max(b)),
        BinaryKind::Min => Some(a.min(b)),
    }
}

fn value(kind: UnaryKind, x: f64) -> f64 {
    match kind {
        UnaryKind::Neg => -x,
        UnaryKind::Exp => x.exp(),
        UnaryKind::Log => x.ln(),
        UnaryKind::Sqrt => x.sqrt(),
        UnaryKind::Rsqrt => 1.0 / x.sqrt(),
        UnaryKind::Recip => 1.0 / x,
        UnaryKind::Square => x * x,
        UnaryKind::Tanh => x.tanh(),
        UnaryKind::Sigmoid => sigmoid(x),
        // Written so that a NaN stays a NaN.
        UnaryKind::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                x
            }
        }
        UnaryKind::Gelu => 0.5 * x * (1.0 + gelu_inner(x).tanh()),
        UnaryKind::GeluErf => x * normal_cdf(x),
        UnaryKind::Silu => x * sigmoid(x),
        UnaryKind::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

fn slope(kind: UnaryKind, x: f64) -> f64 {
    match kind {
        UnaryKind::Neg => -1.0,
        UnaryKind::Exp => x.exp(),
        UnaryKind::Log => 1.0 / x,
        UnaryKind::Sqrt => 0.5 / x.sqrt(),
        UnaryKind::Rsqrt => -0.5 / (x * x.sqrt()),
        UnaryKind::Recip => -1.0 / (x * x),
        UnaryKind::Square => 2.0 * x,
        UnaryKind::Tanh => 1.0 - x.tanh().powi(2),
        UnaryKind::Sigmoid => sigmoid(x) * (1.0 - sigmoid(x)),
        UnaryKind::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                1.0
            }
        }
        UnaryKind::Gelu => {
            let t = gelu_inner(x).tanh();
            let inner = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        }
        UnaryKind::GeluErf => normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
        UnaryKind::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        UnaryKind::Softplus => sigmoid(x),
    }
}

/// √(2/π).
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBE: f64 = 0.044715;

fn gelu_inner(x: f64) -> f64 {
    GELU_SCALE * (x + GELU_CUBE * x * x * x)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The distribution function of the standard normal, ½·erfc(−x/√2).
fn normal_cdf(x: f64) -> f64 {
    let tail = 0.5 * erfc(x.abs() * FRAC_1_SQRT_2);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// The complementary error function of a number that is not negative: by erf's power series near
/// zero, whose terms 2ⁿ·x²ⁿ⁺¹/(2n+1)!! are all positive, and by its continued fraction further
/// out, where one minus the series would lose the digits.
fn erfc(x: f64) -> f64 {
    if x < 2.0 {
        let (mut sum, mut term, mut odd) = (x, x, 1.0);
        while term > sum * f64::EPSILON / 4.0 {
            odd += 2.0;
            term *= 2.0 * x * x / odd;
            sum += term;
        }
        1.0 - 2.0 / PI.sqrt() * (-x * x).exp() * sum
    } else {
        // x + (1/2)/(x + (2/2)/(x + (3/2)/(x + …))), from the inside; 100 levels are ample at 2.
        let fraction = (1..=100).rev().fold(x, |inner, k| x + 0.5 * f64::from(k) / inner);
        (-x * x).exp() / (fraction * PI.sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of erfc to 17 digits, as tables print them.
    #[test]
    fn erfc_matches_tables() {
        for (x, expected) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 0.004_677_734_981_047_266),
            (3.0, 2.209_049_699_858_544e-5),
            (5.0, 1.537_459_794_428_035e-12),
        ] {
            let error = (erfc(x) / expected - 1.0).abs();
            assert!(error < 1e-14, "erfc({x}) = {}: off by {error}", erfc(x));
        }
        // Both forms agree where they meet.
        let below = erfc(f64::from_bits(2f64.to_bits() - 1));
        assert!((below / erfc(2.0) - 1.0).abs() < 1e-13);
        assert!(normal_cdf(f64::NAN).is_nan());
    }
}
