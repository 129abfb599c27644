//! The functions behind the operations' names. All are free of branches.

use phalanx_ir::ops::{BinaryKind, UnaryKind};

use crate::element::CpuFloat;
use crate::kernels::erf::erf;
use crate::kernels::inlined::inlined;

/// A loop that applies a function of one operand, which it is given.
pub(super) trait Loop1<A> {
    fn run(self, f: impl Fn(A) -> A);
}

/// A loop that applies a function of two operands, which it is given.
pub(super) trait Loop2<A> {
    fn run(self, f: impl Fn(A, A) -> A);
}

/// Gives the loop the function that `op` names.
pub(super) fn with_unary<A: CpuFloat>(op: UnaryKind, to: impl Loop1<A>) {
    match op {
        UnaryKind::Neg => to.run(inlined!(|x| -x)),
        UnaryKind::Exp => to.run(inlined!(|x| x.exp())),
        UnaryKind::Log => to.run(inlined!(|x| x.ln())),
        UnaryKind::Sqrt => to.run(inlined!(|x| x.sqrt())),
        UnaryKind::Rsqrt => to.run(inlined!(|x| A::ONE / x.sqrt())),
        UnaryKind::Recip => to.run(inlined!(|x| A::ONE / x)),
        UnaryKind::Square => to.run(inlined!(|x| x * x)),
        UnaryKind::Tanh => to.run(inlined!(|x| x.tanh())),
        UnaryKind::Sigmoid => to.run(inlined!(|x| sigmoid(x))),
        UnaryKind::Relu => to.run(inlined!(|x| if x < A::ZERO { A::ZERO } else { x })),
        UnaryKind::Gelu => to.run(inlined!(|x| x * gelu_gate(x).0)),
        UnaryKind::GeluErf => to.run(inlined!(|x| x * normal_distribution(x))),
        UnaryKind::Silu => to.run(inlined!(|x| x * sigmoid(x))),
        UnaryKind::Softplus => to.run(inlined!(|x| softplus(x))),
    }
}

/// Gives the loop the function `(x, dy) → dy · op′(x)`.
pub(super) fn with_unary_gradient<A: CpuFloat>(op: UnaryKind, to: impl Loop2<A>) {
    let half = A::from_f64(0.5);
    match op {
        UnaryKind::Neg => to.run(inlined!(|_, dy| -dy)),
        UnaryKind::Exp => to.run(inlined!(|x, dy| dy * x.exp())),
        UnaryKind::Log => to.run(inlined!(|x, dy| dy / x)),
        UnaryKind::Sqrt => to.run(inlined!(|x, dy| dy * half / x.sqrt())),
        UnaryKind::Rsqrt => to.run(inlined!(|x, dy| -(dy * half) / (x * x.sqrt()))),
        UnaryKind::Recip => to.run(inlined!(|x, dy| -dy / (x * x))),
        UnaryKind::Square => to.run(inlined!(|x, dy| dy * (x + x))),
        UnaryKind::Tanh => to.run(inlined!(|x, dy| {
            let t = x.tanh();
            dy * (A::ONE - t * t)
        })),
        UnaryKind::Sigmoid => to.run(inlined!(|x, dy| {
            let s = sigmoid(x);
            dy * (s * (A::ONE - s))
        })),
        UnaryKind::Relu => to.run(inlined!(|x, dy| if x > A::ZERO { dy } else { A::ZERO })),
        UnaryKind::Gelu => to.run(inlined!(|x, dy| {
            let (gate, slope) = gelu_gate(x);
            dy * (gate + x * slope)
        })),
        UnaryKind::GeluErf => to.run(inlined!(|x, dy| {
            let density = (-(x * x) * half).exp() * A::from_f64(INVERSE_ROOT_TAU);
            dy * (normal_distribution(x) + x * density)
        })),
        UnaryKind::Silu => to.run(inlined!(|x, dy| {
            let s = sigmoid(x);
            dy * (s + x * (s * (A::ONE - s)))
        })),
        UnaryKind::Softplus => to.run(inlined!(|x, dy| dy * sigmoid(x))),
    }
}

/// Gives the loop the function that `op` names.
pub(super) fn with_binary<A: CpuFloat>(op: BinaryKind, to: impl Loop2<A>) {
    match op {
        BinaryKind::Add => to.run(inlined!(|a, b| a + b)),
        BinaryKind::Sub => to.run(inlined!(|a, b| a - b)),
        BinaryKind::Mul => to.run(inlined!(|a, b| a * b)),
        BinaryKind::Div => to.run(inlined!(|a, b| a / b)),
        BinaryKind::Max => to.run(inlined!(|a, b| larger(a, b))),
        BinaryKind::Min => to.run(inlined!(|a, b| -larger(-a, -b))),
    }
}

/// The larger of two numbers, NaN if either is.
#[inline(always)]
#[expect(clippy::eq_op, reason = "only NaN differs from itself")]
pub(crate) fn larger<A: CpuFloat>(a: A, b: A) -> A {
    if a > b || a != a { a } else { b }
}

#[inline(always)]
fn sigmoid<A: CpuFloat>(x: A) -> A {
    A::ONE / (A::ONE + (-x).exp())
}

/// log(1 + e^x) without overflow: the larger of x and 0, plus log(1 + a) for an a of at most one. What 1 + a
/// loses of a is added again.
#[inline(always)]
fn softplus<A: CpuFloat>(x: A) -> A {
    let a = (-larger(x, -x)).exp();
    let sum = A::ONE + a;
    larger(x, A::ZERO) + (sum.ln() - ((sum - A::ONE) - a) / sum)
}

/// 1 / √(2π)
const INVERSE_ROOT_TAU: f64 = 0.398_942_280_401_432_7;

#[inline(always)]
fn normal_distribution<A: CpuFloat>(x: A) -> A {
    let half = A::from_f64(0.5);
    half + half * erf(x * A::from_f64(std::f64::consts::FRAC_1_SQRT_2))
}

/// The approximation of Φ that `Gelu` uses, and its derivative.
#[inline(always)]
fn gelu_gate<A: CpuFloat>(x: A) -> (A, A) {
    let (root, cubic) = (A::from_f64(2.0 * INVERSE_ROOT_TAU), A::from_f64(0.044715));
    let half = A::from_f64(0.5);
    let x2 = x * x;
    let t = (root * x * (A::ONE + cubic * x2)).tanh();
    let inner_slope = root * (A::ONE + A::from_f64(3.0) * cubic * x2);
    (half + half * t, half * (A::ONE - t * t) * inner_slope)
}
