//! Half precision as kernels see it: stored in 16 bits, computed in singles.

use half::f16;
use phalanx_ir::DType;
use phalanx_ir::half::{f16_to_f32, f32_to_f16};

use crate::element::CpuElement;

impl CpuElement for f16 {
    type Acc = f32;
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn load(self) -> f32 {
        f16_to_f32(self.to_bits())
    }

    #[inline(always)]
    fn store(acc: f32) -> Self {
        f16::from_bits(f32_to_f16(acc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every half-precision number, and singles between neighbours.
    #[test]
    fn every_number_is_that_of_the_library() {
        for bits in 0..=u16::MAX {
            let (own, known) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(own.to_bits() == known.to_bits() || own.is_nan() && known.is_nan(), "{bits:x}");
            if known.is_nan() {
                assert!(f16::from_bits(f32_to_f16(own)).is_nan(), "{bits:x}");
                continue;
            }
            for step in [0_u32, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF] {
                let between = f32::from_bits(known.to_bits().wrapping_add(step));
                let expected = f16::from_f32(between);
                let found = f16::from_bits(f32_to_f16(between));
                let same = found.to_bits() == expected.to_bits();
                assert!(same || found.is_nan() && expected.is_nan(), "{between}: {found}");
            }
        }
        for tiny in [1e-10_f32, -1e-8, 2.9e-8, 3.0e-8, 5.9e-8, f32::MIN_POSITIVE, 1e-44, 7e4, -1e30]
        {
            assert_eq!(f32_to_f16(tiny), f16::from_f32(tiny).to_bits(), "{tiny}");
        }
    }
}
