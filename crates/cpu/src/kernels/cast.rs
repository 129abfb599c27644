//! Casts between stored types.

use half::{bf16, f16};

use super::inlined::inlined;
use crate::element::{CpuElement, vectorized};

/// `out = x` in another type, rounded to nearest; towards zero for integers, and NaN becomes 0.
pub fn cast<S: CastScalar, D: CastScalar>(x: &[S], out: &mut [D]) {
    assert_eq!(x.len(), out.len());
    vectorized(inlined!(|| {
        for (out, x) in out.iter_mut().zip(x) {
            *out = D::from_f64(x.to_f64());
        }
    }));
}

/// A stored type that can be cast to any other.
///
/// All go through `f64`, which holds every value of every type; the compiler removes the detour
/// where a direct conversion gives the same bits.
pub trait CastScalar: Copy {
    /// The value; exact.
    fn to_f64(self) -> f64;
    /// The nearest value of this type.
    fn from_f64(value: f64) -> Self;
}

macro_rules! scalar {
    ($($type:ty: |$x:ident| $to:expr, |$v:ident| $from:expr;)*) => {$(
        impl CastScalar for $type {
            #[inline(always)]
            fn to_f64(self) -> f64 {
                let $x = self;
                $to
            }

            #[inline(always)]
            fn from_f64($v: f64) -> Self {
                $from
            }
        }
    )*};
}

scalar! {
    f64: |x| x, |v| v;
    f32: |x| f64::from(x), |v| v as f32;
    bf16: |x| f64::from(x.load()), |v| bf16::store(v as f32);
    f16: |x| f64::from(x.load()), |v| f16::store(v as f32);
    i32: |x| f64::from(x), |v| v as i32;
    u8: |x| f64::from(x), |v| u8::from(v != 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts() {
        fn to<S: CastScalar, D: CastScalar + Default + Clone>(x: &[S]) -> Vec<D> {
            let mut out = vec![D::default(); x.len()];
            cast(x, &mut out);
            out
        }
        let x = [1.5f64, -2.75, 0.0, 1e10, -1e10, f64::NAN, 1.003_906_25, 16_777_217.0];
        assert_eq!(to::<_, i32>(&x), [1, -2, 0, i32::MAX, i32::MIN, 0, 1, 16_777_217]);
        assert_eq!(to::<_, u8>(&x), [1, 1, 0, 1, 1, 1, 1, 1]);
        let singles = to::<_, f32>(&x);
        assert!(singles.iter().zip(x).all(|(s, x)| s.to_bits() == (x as f32).to_bits()));
        let narrow = to::<_, bf16>(&singles);
        let same = |(b, s): (&bf16, &f32)| b.to_bits() == bf16::from_f32(*s).to_bits();
        assert!(narrow.iter().zip(&singles).all(same));
        assert_eq!(to::<_, f64>(&narrow[..3]), x[..3]);
        assert_eq!(to::<_, f32>(&[16_777_217, -3]), [16_777_216.0, -3.0]);
        assert_eq!(to::<_, bf16>(&[0u8, 1]), [bf16::ZERO, bf16::ONE]);
        assert_eq!(to::<_, i32>(&[0u8, 1]), [0, 1]);
        assert_eq!(to::<_, u8>(&[7, 0, -1]), [1, 0, 1]);
    }
}
