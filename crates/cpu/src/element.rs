//! CpuElement types as kernels see them: stored in one type, computed in another.
//!
//! A kernel is written once, as a plain loop over `T: CpuElement`, computes in `T::Acc`, and is
//! compiled for every instruction set by [`vectorized`]. That only works if everything the loop
//! calls is free of branches and inlined, so `exp` and `tanh` are polynomials of our own here.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use half::bf16;
use phalanx_ir::DType;

/// A type that tensors are stored in.
pub trait CpuElement: Copy + Send + Sync + Default + Debug + PartialEq + bytemuck::Pod {
    /// The type in which values of this type are computed and summed, and statistics are kept.
    type Acc: CpuFloat;
    /// The name of this type in programs.
    const DTYPE: DType;
    /// The value, for computing; exact.
    fn load(self) -> Self::Acc;
    /// The nearest stored value, ties to even.
    fn store(acc: Self::Acc) -> Self;
}

/// A type that kernels compute in: `f32` or `f64`.
pub trait CpuFloat:
    CpuElement<Acc = Self>
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The largest finite value.
    const MAX: Self;
    /// Negative infinity.
    const NEG_INFINITY: Self;
    /// The nearest value to a double.
    fn from_f64(value: f64) -> Self;
    /// This value as a double; exact.
    fn to_f64(self) -> f64;
    /// The larger of two numbers; `other` if either is NaN. One instruction, unlike `f32::max`.
    fn maximum(self, other: Self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// The natural logarithm, from the standard library: not vectorised.
    fn ln(self) -> Self;
    /// `self * factor + addend`, rounded once.
    ///
    /// One instruction in every instruction set above the x86 baseline; there it is a (slow) call,
    /// kept because it makes results equal, bit for bit, on all of them.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `e` to this power, within 2 units in the last place.
    ///
    /// Results that would be subnormal are zero, as is the last factor of two above them.
    fn exp(self) -> Self;
    /// `exp(self) - 1` without cancellation near zero, for arguments that are not positive.
    fn exp_m1_nonpositive(self) -> Self;
    /// The hyperbolic tangent, within 4 units in the last place.
    #[inline(always)]
    fn tanh(self) -> Self {
        let m = (-(self.abs() + self.abs())).exp_m1_nonpositive();
        let magnitude = -m / (m + Self::ONE + Self::ONE);
        if self < Self::ZERO { -magnitude } else { magnitude }
    }
}

/// Runs `kernel` compiled for the best instruction set of this machine.
///
/// The code is compiled once per instruction set, and only what is inlined into it takes part:
/// mark the closure and all it calls with `#[inline(always)]`, as in
/// `vectorized(#[inline(always)] || share(x, y))`.
#[inline(always)]
pub fn vectorized<R>(kernel: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(kernel)
}

impl CpuElement for bf16 {
    type Acc = f32;
    const DTYPE: DType = DType::Bf16;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Done by hand because the conversion of `half` branches on NaN and so does not vectorise.
    #[inline(always)]
    fn store(acc: f32) -> Self {
        let bits = acc.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
        let quiet = bits | 0x40_0000;
        let bits = if acc.is_nan() { quiet } else { rounded };
        bf16::from_bits((bits >> 16) as u16)
    }
}

/// Constants and loops that differ between the two precisions only in their numbers.
macro_rules! float {
    (
        $float:ident, $dtype:expr, mantissa: $mantissa:literal, bias: $bias:literal,
        smallest: $smallest:literal, largest: $largest:literal,
        ln2: $ln2_high:literal + $ln2_low:literal, coefficients: $coefficients:expr
    ) => {
        impl CpuElement for $float {
            type Acc = $float;
            const DTYPE: DType = $dtype;

            #[inline(always)]
            fn load(self) -> $float {
                self
            }

            #[inline(always)]
            fn store(acc: $float) -> Self {
                acc
            }
        }

        impl CpuFloat for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const MAX: Self = $float::MAX;
            const NEG_INFINITY: Self = $float::NEG_INFINITY;

            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $float
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                if self > other { self } else { other }
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $float::abs(self)
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }

            #[inline(always)]
            fn ln(self) -> Self {
                $float::ln(self)
            }

            #[inline(always)]
            fn mul_add(self, factor: Self, addend: Self) -> Self {
                $float::mul_add(self, factor, addend)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                // The scale is half of the power of two, so that it is finite for the largest
                // results; doubling the product then overflows where it should.
                let (half_scale, m1) = self.reduce();
                let value = $float::mul_add(m1, half_scale, half_scale) * 2.0;
                let value = if self < $smallest { 0.0 } else { value };
                if self > $largest { $float::INFINITY } else { value }
            }

            #[inline(always)]
            fn exp_m1_nonpositive(self) -> Self {
                let (half_scale, m1) = self.reduce();
                let scale = half_scale * 2.0;
                let value = $float::mul_add(m1, scale, scale - 1.0);
                if self < $smallest { -1.0 } else { value }
            }
        }

        impl Reduce for $float {
            /// Splits `x = n·ln 2 + r`, `|r| ≤ ln 2 / 2`: gives `2ⁿ⁻¹` and `eʳ − 1`.
            ///
            /// Adding 1.5·2^mantissa rounds to an integer and leaves it in the low bits; with the
            /// exponent's bias added as well, a shift makes those bits a power of two.
            #[inline(always)]
            fn reduce(self) -> (Self, Self) {
                const ROUND: $float = 1.5 * (1u64 << $mantissa) as $float;
                const MAGIC: $float = ROUND + ($bias - 1) as $float;
                let shifted = self.mul_add(std::$float::consts::LOG2_E, MAGIC);
                let n = shifted - MAGIC;
                let half_scale = $float::from_bits(shifted.to_bits() << $mantissa);
                let r = n.mul_add(-$ln2_low, n.mul_add(-$ln2_high, self));
                let mut q = 0.0;
                for coefficient in $coefficients {
                    q = r.mul_add(q, coefficient);
                }
                (half_scale, (r * r).mul_add(q, r))
            }
        }
    };
}

/// Range reduction, which `exp` and `exp_m1_nonpositive` share.
trait Reduce: Sized {
    fn reduce(self) -> (Self, Self);
}

// Five coefficients of (eʳ − 1 − r) / r², highest first, fitted on |r| ≤ ln 2 / 2 for the least
// relative error of eʳ (5e-9).
float!(
    f32, DType::F32, mantissa: 23, bias: 127,
    smallest: -86.9, largest: 88.722_84,
    ln2: 0.693_359_4 + -0.000_212_194_44,
    coefficients: [0.001_394_641_4, 0.008_369_145, 0.041_666_266, 0.166_665_17, 0.5f32]
);

// Taylor's coefficients up to r¹³; the remainder is below 5e-18 of eʳ.
float!(
    f64, DType::F64, mantissa: 52, bias: 1023,
    smallest: -708.0, largest: 709.782_712_893_384,
    ln2: 0.693_147_180_369_123_8 + 1.908_214_929_270_587_7e-10,
    coefficients: [
        1.0 / 6_227_020_800.0, 1.0 / 479_001_600.0, 1.0 / 39_916_800.0, 1.0 / 3_628_800.0,
        1.0 / 362_880.0, 1.0 / 40_320.0, 1.0 / 5_040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0,
        1.0 / 6.0, 0.5f64,
    ]
);

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units in the last place of the expected value.
    fn ulps_f32(got: f32, want: f64) -> f64 {
        let ulp = 2f64.powi((want.abs().log2().floor() as i32).max(-126) - 23);
        (f64::from(got) - want).abs() / ulp
    }

    fn sweep(from: f64, to: f64, steps: usize) -> impl Iterator<Item = f64> {
        (0..=steps).map(move |i| from + (to - from) * i as f64 / steps as f64)
    }

    #[test]
    fn exp_of_singles() {
        for x in sweep(-86.9, 88.7228, 400_000) {
            let x = x as f32;
            let error = ulps_f32(CpuFloat::exp(x), f64::from(x).exp());
            assert!(error <= 1.5, "exp({x}): {error} ulp");
        }
    }

    #[test]
    fn exp_of_doubles() {
        for x in sweep(-708.0, 709.78, 400_000) {
            let (got, want) = (CpuFloat::exp(x), x.exp());
            assert!((got / want - 1.0).abs() <= 4.5e-16, "exp({x}): {got} not {want}");
        }
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(CpuFloat::exp(0f32), 1.0);
        assert_eq!(CpuFloat::exp(0f64), 1.0);
        for x in [-87f32, -104.0, -1e30, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(CpuFloat::exp(x), 0.0, "exp({x})");
            assert_eq!(CpuFloat::exp(f64::from(x) * 10.0), 0.0);
        }
        for x in [88.8f32, 1e4, f32::MAX, f32::INFINITY] {
            assert_eq!(CpuFloat::exp(x), f32::INFINITY, "exp({x})");
            assert_eq!(CpuFloat::exp(f64::from(x) * 10.0), f64::INFINITY);
        }
        assert!(CpuFloat::exp(88.7228f32).is_finite());
        assert!(CpuFloat::exp(f32::NAN).is_nan() && CpuFloat::exp(f64::NAN).is_nan());
    }

    #[test]
    fn tanh_of_both() {
        for x in sweep(-12.0, 12.0, 300_001).chain(sweep(-1e-3, 1e-3, 1001)) {
            let single = x as f32;
            let error = ulps_f32(CpuFloat::tanh(single), f64::from(single).tanh());
            assert!(error <= 4.0, "tanh({single}): {error} ulp");
            let (got, want) = (CpuFloat::tanh(x), x.tanh());
            assert!((got - want).abs() <= 1e-15 * want.abs(), "tanh({x}): {got} not {want}");
        }
        assert_eq!(CpuFloat::tanh(f32::INFINITY), 1.0);
        assert_eq!(CpuFloat::tanh(f32::NEG_INFINITY), -1.0);
        assert!(CpuFloat::tanh(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for high in 0..=u16::MAX {
            let value = bf16::from_bits(high);
            if value.is_nan() {
                assert!(bf16::store(value.load()).is_nan());
                continue;
            }
            assert_eq!(bf16::store(value.load()).to_bits(), high);
            for low in [1u32, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let between = f32::from_bits(u32::from(high) << 16 | low);
                let (got, want) = (bf16::store(between), bf16::from_f32(between));
                assert!(got == want || got.is_nan() && want.is_nan(), "{between}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let xs: Vec<f32> = sweep(-90.0, 90.0, 10_000).map(|x| x as f32).collect();
        let mut fast = xs.clone();
        vectorized(
            #[inline(always)]
            || fast.iter_mut().for_each(|x| *x = CpuFloat::exp(*x)),
        );
        for (x, y) in xs.iter().zip(&fast) {
            assert_eq!(CpuFloat::exp(*x).to_bits(), y.to_bits(), "exp({x})");
        }
    }
}
