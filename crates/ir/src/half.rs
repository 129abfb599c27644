//! Half precision in bits, without branches: loops over these conversions become vector code, which
//! those of a library with its own tests for NaN and small numbers do not.

/// The value of a half-precision number.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let wide = u32::from(bits);
    let magnitude = (wide & 0x7FFF) << 13;
    // As the bits of a single, exponents are too small by 112. The product also makes subnormal
    // numbers right.
    let number = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = magnitude | 0x7F80_0000;
    let special_too = wide & 0x7C00 == 0x7C00;
    let magnitude = if special_too { special } else { number.to_bits() };
    f32::from_bits(magnitude | (wide & 0x8000) << 16)
}

/// The nearest half-precision number, ties to even; infinity for what is too large.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let sign = (bits >> 16) & 0x8000;
    // Adding a half shifts the bits of a number below 2⁻¹⁴ to where a subnormal one has them, and
    // rounds them.
    const SHIFT: u32 = 126 << 23;
    let small = (f32::from_bits(magnitude) + f32::from_bits(SHIFT)).to_bits().wrapping_sub(SHIFT);
    let odd = (magnitude >> 13) & 1;
    let usual = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    let nan = magnitude > 0x7F80_0000;
    let large = if nan { 0x7E00 } else { 0x7C00 };
    let finite = if magnitude < 113 << 23 { small } else { usual };
    let half = if magnitude >= 143 << 23 { large } else { finite };
    (half | sign) as u16
}
