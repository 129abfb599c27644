//! A single in two halves of 16 bits, exactly: the upper one is the nearest `bf16`.
//!
//! Weights in bf16 are copies of f32 masters, whose upper half they almost are. So the 16 bits that are missing are
//! all that must be kept besides them: 2 bytes of a parameter instead of 4. The upper half is rounded to nearest,
//! and ties go away from zero: a tie that goes to even could come from either side, so it could not be undone.

/// The nearest `bf16`, as bits, and the lower 16 bits.
///
/// NaN stays NaN and loses its lower bits. Numbers beyond the largest `bf16` have an infinite upper half, and
/// come back all the same.
#[inline(always)]
pub const fn split(value: f32) -> (u16, u16) {
    let bits = value.to_bits();
    match value.is_nan() {
        // Quiet, so that the half alone is NaN too.
        true => ((bits >> 16) as u16 | 0x40, 0),
        false => ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16),
    }
}

/// The number that [`split`] gives these halves of.
#[inline(always)]
pub const fn join(upper: u16, lower: u16) -> f32 {
    // A lower half that has its first bit rounded the upper one up.
    let upper = upper.wrapping_sub(lower >> 15);
    f32::from_bits((upper as u32) << 16 | lower as u32)
}

/// [`join`] of numbers one after the other, as native-endian bytes.
pub fn join_bytes(upper: &[u8], lower: &[u8]) -> Vec<u8> {
    let (upper, lower) = (upper.as_chunks::<2>().0, lower.as_chunks::<2>().0);
    let joined = upper.iter().zip(lower).flat_map(|(&upper, &lower)| {
        join(u16::from_ne_bytes(upper), u16::from_ne_bytes(lower)).to_ne_bytes()
    });
    joined.collect()
}

/// [`split`] of numbers one after the other, as native-endian bytes: upper halves and lower halves.
pub fn split_bytes(full: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let [mut uppers, mut lowers] = [(); 2].map(|()| Vec::with_capacity(full.len() / 2));
    for &value in full.as_chunks::<4>().0 {
        let (upper, lower) = split(f32::from_ne_bytes(value));
        uppers.extend(upper.to_ne_bytes());
        lowers.extend(lower.to_ne_bytes());
    }
    (uppers, lowers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The distance of a number to the one whose upper half is this, in units of the lower half.
    fn off(bits: u32, upper: u16) -> i64 {
        i64::from(bits) - (i64::from(upper) << 16)
    }

    #[test]
    fn every_number_comes_back_and_its_upper_half_is_the_nearest() {
        // Every lower half with zeros, subnormals, the smallest and the largest numbers, and some between.
        let edges =
            [0, 1, 0x7e, 0x7f, 0x80, 0x81, 0x3f7f, 0x3f80, 0x3f81, 0x7eff, 0x7f00, 0x7f7e, 0x7f7f];
        for upper in edges.into_iter().chain((0..0x7f80).step_by(997)) {
            for bits in (0..=0xffff).map(|lower| u32::from(upper as u16) << 16 | lower) {
                for bits in [bits, bits | 0x8000_0000] {
                    let (upper, lower) = split(f32::from_bits(bits));
                    assert_eq!(join(upper, lower).to_bits(), bits);
                    // Away from zero where both sides are as near.
                    let off = off(bits & 0x7fff_ffff, upper & 0x7fff);
                    assert!(
                        (-0x8000..0x8000).contains(&off),
                        "{bits:#x}: {upper:#x}, off by {off}"
                    );
                    assert_eq!(upper >> 15, (bits >> 31) as u16);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for (value, upper) in [(f32::INFINITY, 0x7f80), (f32::NEG_INFINITY, 0xff80)] {
            assert_eq!(split(value), (upper, 0));
            assert_eq!(join(upper, 0), value);
        }
        // Rounded to infinity, as by ties to even, and back.
        assert_eq!(split(f32::MAX), (0x7f80, 0xffff));
        assert_eq!(join(0x7f80, 0xffff), f32::MAX);
        for bits in [0x7f80_0001, 0x7fff_ffff, 0x7fff_8000, 0xff80_0001, 0xffff_ffff_u32] {
            let (upper, lower) = split(f32::from_bits(bits));
            assert!(join(upper, lower).is_nan() && join(upper, 0).is_nan(), "{bits:#x}");
            assert_eq!((upper >> 15, lower), ((bits >> 31) as u16, 0));
            assert_eq!(split(join(upper, lower)), (upper, lower));
        }
    }

    #[test]
    fn bytes_go_both_ways() {
        let full: Vec<u8> = [1.5f32, -0.3, 7e30].iter().flat_map(|x| x.to_ne_bytes()).collect();
        let (upper, lower) = split_bytes(&full);
        assert_eq!([upper.len(), lower.len()], [6; 2]);
        assert_eq!(join_bytes(&upper, &lower), full);
    }

    #[test]
    fn halves_of_zero_are_zero() {
        assert_eq!((split(0.0), split(-0.0)), ((0, 0), (0x8000, 0)));
        assert_eq!(join(0x8000, 0).to_bits(), (-0.0_f32).to_bits());
    }
}
