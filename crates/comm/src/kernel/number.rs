//! Element types as reductions see them: stored in one type, combined in another.

use half::{bf16, f16};
use phalanx_ir::half::{f16_to_f32, f32_to_f16};

/// A type whose values can be combined.
pub(super) trait Number: Copy {
    /// What values are combined in.
    type Acc: Copy + Default;
    /// The value, for combining; exact.
    fn load(self) -> Self::Acc;
    /// The nearest stored value, ties to even.
    fn store(acc: Self::Acc) -> Self;
    /// The sum.
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// The larger; `b` if either is NaN. One instruction, unlike the standard library's.
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! number {
    ($type:ident, $add:expr) => {
        impl Number for $type {
            type Acc = $type;

            #[inline(always)]
            fn load(self) -> $type {
                self
            }

            #[inline(always)]
            fn store(acc: $type) -> $type {
                acc
            }

            #[inline(always)]
            fn add(a: $type, b: $type) -> $type {
                $add(a, b)
            }

            #[inline(always)]
            fn max(a: $type, b: $type) -> $type {
                if a > b { a } else { b }
            }
        }
    };
}

number!(f64, |a: f64, b: f64| a + b);
number!(f32, |a: f32, b: f32| a + b);
number!(i32, i32::wrapping_add);

impl Number for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// By hand, because the conversion of `half` branches on NaN and so does not vectorise.
    #[inline(always)]
    fn store(acc: f32) -> bf16 {
        let bits = acc.to_bits();
        let nearest = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
        bf16::from_bits(if is_nan { quiet_nan } else { nearest } as u16)
    }

    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }

    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
}

impl Number for f16 {
    type Acc = f32;

    #[inline(always)]
    fn load(self) -> f32 {
        f16_to_f32(self.to_bits())
    }

    #[inline(always)]
    fn store(acc: f32) -> f16 {
        f16::from_bits(f32_to_f16(acc))
    }

    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }

    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
}
