//! A logarithm and a cosine of sums, products and quotients alone, which every machine rounds alike: the system's
//! differ in the last bit between machines. GPUs compute the same operations (`cuda/src/kernels/draw.cu`).
//!
//! Both use the polynomials of fdlibm, whose errors are below one unit in the last place.

/// The natural logarithm of a normal number above zero.
#[inline]
pub(super) fn ln(x: f64) -> f64 {
    // x = 2^k · (1 + f), with 1 + f from √½ to √2.
    const ONE: u64 = 0x3ff0_0000_0000_0000;
    const ROOT: u64 = 0x3fe6_a09e_0000_0000;
    let bits = x.to_bits() + (ONE - ROOT);
    let k = (bits >> 52) as i32 - 0x3ff;
    let f = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) + ROOT) - 1.0;
    let (half, s) = (0.5 * f * f, f / (2.0 + f));
    let z = s * s;
    let w = z * z;
    let even = w
        * (3.999_999_999_940_942e-1
            + w * (2.222_219_843_214_978_4e-1 + w * 1.531_383_769_920_937_3e-1));
    let odd = z
        * (6.666_666_666_666_735e-1
            + w * (2.857_142_874_366_239e-1
                + w * (1.818_357_216_161_805e-1 + w * 1.479_819_860_511_658_6e-1)));
    let k = f64::from(k);
    s * (half + (odd + even)) + k * 1.908_214_929_270_587_7e-10 - half
        + f
        + k * 6.931_471_803_691_238e-1
}

/// The cosine of so many turns, from 0 to 1.
#[inline]
pub(super) fn cos_of_turns(turns: f64) -> f64 {
    // The nearest quarter, and what is left of it: exactly, and then as an angle.
    let quarter = (4.0 * turns + 0.5).floor();
    let x = (4.0 * turns - quarter) * std::f64::consts::FRAC_PI_2;
    let z = x * x;
    let w = z * z;
    let cosine = {
        let r = z
            * (4.166_666_666_666_66e-2
                + z * (-1.388_888_888_887_411e-3 + z * 2.480_158_728_947_673e-5))
            + w * w
                * (-2.755_731_435_139_066_3e-7
                    + z * (2.087_572_321_298_175e-9 + z * -1.135_964_755_778_819_5e-11));
        let half = 0.5 * z;
        let rest = 1.0 - half;
        rest + ((1.0 - rest - half) + z * r)
    };
    let sine = {
        let r = 8.333_333_333_322_49e-3
            + z * (-1.984_126_982_985_795e-4 + z * 2.755_731_370_707_006_8e-6)
            + z * w * (-2.505_076_025_340_686_3e-8 + z * 1.589_690_995_211_55e-10);
        x + z * x * (-1.666_666_666_666_663_2e-1 + z * r)
    };
    match quarter as i32 % 4 {
        0 => cosine,
        1 => -sine,
        2 => -cosine,
        _ => sine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far a value is from the system's, in units of its last place or of 2⁻⁵⁴, whichever is larger.
    fn apart(own: f64, system: f64) -> f64 {
        (own - system).abs() / (system.abs() * f64::EPSILON / 2.0).max(f64::EPSILON / 4.0)
    }

    #[test]
    fn they_agree_with_the_system() {
        let numbers = (1..20_000u32).map(|i| f64::from(i) / 20_011.0);
        let tiny = (1..=53).map(|i| 0.5f64.powi(i));
        for x in numbers.chain(tiny).chain([1.0, 1.0 - f64::EPSILON / 2.0]) {
            assert!(apart(ln(x), x.ln()) <= 2.0, "ln {x}: {} {}", ln(x), x.ln());
            // The system's angle is rounded before its cosine is taken.
            let (own, system) = (cos_of_turns(x), (std::f64::consts::TAU * x).cos());
            assert!((own - system).abs() <= 8.0 * f64::EPSILON, "cos {x}: {own} {system}");
        }
        assert_eq!([0.0, 0.25, 0.5, 0.75].map(cos_of_turns), [1.0, 0.0, -1.0, 0.0]);
    }

    /// Bits that every machine must give.
    #[test]
    fn bits_are_known() {
        let values = [0.1, 0.3, 0.9, 1e-10];
        let found = values.map(|x| (ln(x).to_bits(), cos_of_turns(x).to_bits()));
        assert_eq!(found, KNOWN);
    }

    const KNOWN: [(u64, u64); 4] = [
        (0xc002_6bb1_bbb5_5515, 0x3fe9_e377_9b97_f4a8),
        (0xbff3_4378_fcbd_a721, 0xbfd3_c6ef_372f_e94e),
        (0xbfba_f8e8_210a_415c, 0x3fe9_e377_9b97_f4a8),
        (0xc037_069e_2aa2_aa5b, 0x3ff0_0000_0000_0000),
    ];
}
