//! Counter-based random numbers (Philox4x32-10, Salmon et al., 2011).
//!
//! Every random number in Phalanx is a pure function of a key and a counter, never of how many
//! numbers were drawn before it. So a dropout mask, an initial weight or a sampled batch is the
//! same whatever the layout, the thread count or the order of execution.

/// Four random words for one (key, counter) pair.
#[inline]
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    const W0: u32 = 0x9E37_79B9;
    const W1: u32 = 0xBB67_AE85;
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = M0 * u64::from(c0);
        let p1 = M1 * u64::from(c2);
        (c0, c1, c2, c3) = (
            (p1 >> 32) as u32 ^ c1 ^ k0,
            p1 as u32,
            (p0 >> 32) as u32 ^ c3 ^ k1,
            p0 as u32,
        );
        k0 = k0.wrapping_add(W0);
        k1 = k1.wrapping_add(W1);
    }
    [c0, c1, c2, c3]
}

/// A stream of numbers for one purpose: a seed, and what the numbers are for.
///
/// Two streams with different purposes are independent; the `index` of a number within its stream
/// is a global element index, never a local one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    purpose: u64,
}

impl Stream {
    /// The stream of `seed` for a named purpose (a parameter's name, `"batch order"`, …).
    pub fn named(seed: u64, purpose: &str) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            purpose: fnv1a(purpose.as_bytes()),
        }
    }

    /// The four words at `index`.
    #[inline]
    pub fn words(self, index: u64) -> [u32; 4] {
        let p = self.purpose;
        philox(
            self.key,
            [
                index as u32,
                (index >> 32) as u32,
                p as u32,
                (p >> 32) as u32,
            ],
        )
    }

    /// A number uniform in `[0, 1)`, with 53 random bits.
    #[inline]
    pub fn uniform(self, index: u64) -> f64 {
        let [a, b, ..] = self.words(index);
        unit_interval(a, b)
    }

    /// A standard normal number, by Box and Muller's transform.
    #[inline]
    pub fn normal(self, index: u64) -> f64 {
        let [a, b, c, d] = self.words(index);
        let (u, v) = (1.0 - unit_interval(a, b), unit_interval(c, d));
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// An integer uniform in `0..bound`; the bias of the multiplication is below 2⁻⁶⁴·bound.
    #[inline]
    pub fn below(self, index: u64, bound: u64) -> u64 {
        let [a, b, ..] = self.words(index);
        let word = u64::from(a) << 32 | u64::from(b);
        ((u128::from(word) * u128::from(bound)) >> 64) as u64
    }
}

/// The 64-bit FNV-1a hash: stable across builds and machines, unlike the standard hasher.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn unit_interval(high: u32, low: u32) -> f64 {
    ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (kat_vectors, philox4x32-10).
    #[test]
    fn philox_known_answers() {
        assert_eq!(
            philox([0, 0], [0; 4]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 2], [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn moments_of_the_normal() {
        let stream = Stream::named(7, "test");
        let n = 100_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for i in 0..n {
            let x = stream.normal(i);
            sum += x;
            squares += x * x;
        }
        let mean = sum / n as f64;
        assert!(mean.abs() < 0.01, "mean {mean}");
        assert!((squares / n as f64 - 1.0).abs() < 0.02);
    }

    #[test]
    fn streams_of_different_purposes_differ() {
        assert_ne!(
            Stream::named(1, "a").words(0),
            Stream::named(1, "b").words(0)
        );
        assert_ne!(
            Stream::named(1, "a").words(0),
            Stream::named(2, "a").words(0)
        );
    }
}
