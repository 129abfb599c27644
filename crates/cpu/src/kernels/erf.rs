//! The error function, free of branches.
//!
//! Below one it is `x + x · P(x²)`; above, `1 − exp(−x²) · Q(1 / (|x| + 2))`, where P and Q are
//! polynomials fitted at Chebyshev's points to high-precision values: to 7e-9 for singles and
//! 3e-15 for doubles.

use crate::element::CpuFloat;

/// The error function of `x`.
#[inline(always)]
pub(crate) fn erf<A: CpuFloat>(x: A) -> A {
    let magnitude = x.abs();
    if size_of::<A>() == 4 {
        evaluate(x, magnitude, NEAR_SINGLE, FAR_SINGLE, 4.0)
    } else {
        evaluate(x, magnitude, NEAR_DOUBLE, FAR_DOUBLE, 6.0)
    }
}

/// `end` is where the function no longer differs from one.
#[inline(always)]
fn evaluate<A: CpuFloat, const N: usize, const M: usize>(
    x: A,
    magnitude: A,
    near: [f64; N],
    far: [f64; M],
    end: f64,
) -> A {
    // The leading term is added last and exactly, which keeps the rounding error below one unit.
    let near = x.mul_add(polynomial(near, x * x), x);
    let end = A::from_f64(end);
    // Written so that a NaN stays one.
    let clamped = if magnitude > end { end } else { magnitude };
    let q = polynomial(far, A::ONE / (clamped + A::from_f64(2.0)));
    let far = (-(-(clamped * clamped)).exp()).mul_add(q, A::ONE);
    let far = if x < A::ZERO { -far } else { far };
    if magnitude < A::ONE { near } else { far }
}

/// Horner's scheme, the highest coefficient first.
#[inline(always)]
fn polynomial<A: CpuFloat, const N: usize>(coefficients: [f64; N], x: A) -> A {
    let mut sum = A::ZERO;
    for coefficient in coefficients {
        sum = sum.mul_add(x, A::from_f64(coefficient));
    }
    sum
}

const NEAR_SINGLE: [f64; 7] = [
    7.87587506e-5,
    -0.000801686429,
    0.00518908742,
    -0.026854212,
    0.112835947,
    -0.376126267,
    0.12837917,
];
const FAR_SINGLE: [f64; 7] =
    [-3.4323474, -1.8260864, 6.45592085, 0.8119633, 1.32302853, 0.54726868, 0.000605118391];
const NEAR_DOUBLE: [f64; 12] = [
    -7.795898827002142e-10,
    1.3720064546777686e-8,
    -1.6208483801871706e-7,
    1.6447424703317362e-6,
    -1.492473690741966e-5,
    0.00012055294904839708,
    -0.0008548325975389692,
    0.0052239776071164227,
    -0.02686617064323777,
    0.11283791670945006,
    -0.3761263890318354,
    0.1283791670955126,
];
const FAR_DOUBLE: [f64; 14] = [
    -429.4776984550212,
    1158.0513003417066,
    -1257.9568815514952,
    630.882573148487,
    -80.02543010194255,
    -47.697111655314366,
    14.467947282642998,
    -6.509734551806533,
    3.8190324164133286,
    2.6783440684204612,
    1.9869259419483524,
    1.1276825892207487,
    0.5642132120338942,
    -3.63268936459147e-7,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The power series, which converges everywhere and loses no digits that matter below 3; above,
    /// the continued fraction of the complement.
    fn reference(x: f64) -> f64 {
        let a = x.abs();
        let scale = std::f64::consts::FRAC_2_SQRT_PI * (-a * a).exp();
        let value = if a < 3.0 {
            let (mut term, mut sum) = (a, a);
            for n in 1..200 {
                term *= 2.0 * a * a / f64::from(2 * n + 1);
                sum += term;
            }
            scale * sum
        } else {
            let fraction = (1..200).rev().fold(a, |f, n| a + f64::from(n) / 2.0 / f);
            1.0 - scale / 2.0 / fraction
        };
        value.copysign(x)
    }

    #[test]
    fn agrees_with_the_series() {
        // erf(1) to 16 digits (Abramowitz and Stegun, table 7.1), so that the reference is held to something.
        assert!((reference(1.0) - 0.842_700_792_949_714_9).abs() < 1e-15);
        assert!((reference(3.0 - 1e-9) - reference(3.0)).abs() < 1e-12);
        for i in -70_000..=70_000 {
            let x = f64::from(i) * 1e-4;
            let want = reference(x);
            let (double, single) = (erf(x), f64::from(erf(x as f32)));
            assert!((double - want).abs() <= 1e-14, "erf({x}): {double}, not {want}");
            let want = reference(f64::from(x as f32));
            let allowed = 1.2e-7 * want.abs().max(1e-30);
            assert!((single - want).abs() <= allowed, "erf({x}): {single}, not {want}");
        }
        assert!(erf(f32::NAN).is_nan() && erf(f64::NAN).is_nan());
        assert_eq!((erf(f32::INFINITY), erf(f64::NEG_INFINITY)), (1.0, -1.0));
    }
}
