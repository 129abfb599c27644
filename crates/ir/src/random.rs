//! Counter-based random numbers (Philox4x32-10, Salmon et al., 2011).
//!
//! Every random number in Phalanx is a pure function of a key and a counter, never of how many
//! numbers were drawn before it. So a dropout mask, an initial weight or a sampled batch is the
//! same whatever the layout, the thread count or the order of execution; and whatever the machine, because
//! normal numbers are computed by operations that all machines round alike (`elementary`).

mod elementary;

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
        (c0, c1, c2, c3) =
            ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
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
        Self { key: [seed as u32, (seed >> 32) as u32], purpose: fnv1a(purpose.as_bytes()) }
    }

    /// The key of its words, and what their counters have besides the index: low words first.
    pub fn identity(self) -> ([u32; 2], [u32; 2]) {
        (self.key, [self.purpose as u32, (self.purpose >> 32) as u32])
    }

    /// The four words at `index`.
    #[inline]
    pub fn words(self, index: u64) -> [u32; 4] {
        let p = self.purpose;
        philox(self.key, [index as u32, (index >> 32) as u32, p as u32, (p >> 32) as u32])
    }

    /// A number uniform in `[0, 1)`, with 53 random bits.
    #[inline]
    pub fn uniform(self, index: u64) -> f64 {
        let [a, b, ..] = self.words(index);
        unit_interval(a, b)
    }

    /// A standard normal number.
    #[inline]
    pub fn normal(self, index: u64) -> f64 {
        normal_of(self.words(index))
    }

    /// An integer uniform in `0..bound`; the bias of the multiplication is below 2⁻⁶⁴·bound.
    #[inline]
    pub fn below(self, index: u64, bound: u64) -> u64 {
        let [a, b, ..] = self.words(index);
        let word = u64::from(a) << 32 | u64::from(b);
        ((u128::from(word) * u128::from(bound)) >> 64) as u64
    }
}

/// Four random words for four consecutive elements of a random op: the one definition of which
/// elements dropout keeps, in every engine and every layout.
///
/// * `key` is the op's key operand: seed low, seed high, step, segment instance, and the global
///   index of the micro-batch's first sample. Its words are read as unsigned.
/// * `site` distinguishes the random ops of one segment.
/// * `row` is the index along dim 0 of the **global** value: `key[4] + row` is the global sample.
/// * `quad` is a quarter, rounded down, of the element's row-major index within its sample, over
///   the **global** extents of all dims but the first. For attention probabilities that index is
///   `(head·s + i)·t + j`, of query head, query and key.
///
/// Philox's key is the seed. Its counter is `quad` (low 32 bits), the global sample (low 32 bits,
/// with the high 32 bits of `quad` folded in by exclusive or: samples of more than 2³⁴ elements do
/// not repeat their masks), the step, and `site | instance << 16`: 65,536 sites and as many
/// instances are distinguished.
#[inline]
pub fn mask_words(key: [i32; 5], site: u32, row: u64, quad: u64) -> [u32; 4] {
    let [low, high, step, instance, first] = key.map(|word| word as u32);
    let sample = first.wrapping_add(row as u32);
    let counter = [quad as u32, sample ^ (quad >> 32) as u32, step, site | instance << 16];
    philox([low, high], counter)
}

/// The smallest word that keeps an element dropped with probability `p`: p·2³², rounded up.
///
/// It is 2³², which no word reaches, where `p` is within 2⁻³² of one; hence the wide type.
#[inline]
pub fn keep_threshold(p: f64) -> u64 {
    (p * (1u64 << 32) as f64).ceil() as u64
}

/// Whether dropout with probability `p` keeps an element: its word, number `element % 4` of
/// [`mask_words`] at `element / 4`, is at least p·2³².
#[inline]
pub fn keeps(key: [i32; 5], site: u32, row: u64, element: u64, p: f64) -> bool {
    let words = mask_words(key, site, row, element / 4);
    u64::from(words[(element % 4) as usize]) >= keep_threshold(p)
}

/// The number in `[0, 1)` of an element, in every engine and every layout; 53 random bits. Arguments as of
/// [`mask_words`], but each element has four words of its own.
#[inline]
pub fn uniform_at(key: [i32; 5], site: u32, row: u64, element: u64) -> f64 {
    let [a, b, ..] = mask_words(key, site, row, element);
    unit_interval(a, b)
}

/// The standard normal number of an element, as [`uniform_at`].
#[inline]
pub fn normal_at(key: [i32; 5], site: u32, row: u64, element: u64) -> f64 {
    normal_of(mask_words(key, site, row, element))
}

/// A standard normal number, by Box and Muller's transform.
#[inline]
fn normal_of([a, b, c, d]: [u32; 4]) -> f64 {
    let (u, v) = (1.0 - unit_interval(a, b), unit_interval(c, d));
    (-2.0 * elementary::ln(u)).sqrt() * elementary::cos_of_turns(v)
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
        assert_eq!(philox([0, 0], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
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
    fn numbers_of_elements_have_their_moments() {
        let n = 100_000;
        let mean = |f: &dyn Fn(u64) -> f64| (0..n).map(f).sum::<f64>() / n as f64;
        let (key, site, row) = ([3, -4, 5, 6, 7], 1, 2);
        let uniform = |i| uniform_at(key, site, row, i);
        let normal = |i| normal_at(key, site, row, i);
        assert!((0..n).all(|i| (0.0..1.0).contains(&uniform(i))));
        // Within four standard deviations of a mean of so many.
        for (found, expected, deviation) in [
            (mean(&uniform), 0.5, 0.289),
            (mean(&|i| uniform(i).powi(2)), 1.0 / 3.0, 0.298),
            (mean(&normal), 0.0, 1.0),
            (mean(&|i| normal(i).powi(2)), 1.0, 1.41),
            (mean(&|i| normal(i).powi(3)), 0.0, 3.87),
            (mean(&|i| normal(i) * normal(i + 1)), 0.0, 1.0),
        ] {
            let bound = 4.0 * deviation / (n as f64).sqrt();
            assert!((found - expected).abs() < bound, "{found} {expected} {bound}");
        }
        // Row 11 of the first micro-batch is row 3 of the one that begins at sample 8.
        let (first, second) = ([1, 2, 3, 4, 0], [1, 2, 3, 4, 8]);
        assert!((0..64).all(|i| normal_at(first, 9, 11, i) == normal_at(second, 9, 3, i)));
    }

    #[test]
    fn streams_of_different_purposes_differ() {
        assert_ne!(Stream::named(1, "a").words(0), Stream::named(1, "b").words(0));
        assert_ne!(Stream::named(1, "a").words(0), Stream::named(2, "a").words(0));
    }

    #[test]
    fn masks_have_the_right_frequency_and_are_independent() {
        let n = 100_000u64;
        let share = |key: [i32; 5], site: u32, row: u64, p: f64| {
            (0..n).filter(|&i| keeps(key, site, row, i, p)).count() as f64 / n as f64
        };
        let key = [3, -4, 5, 6, 7];
        for p in [0.0, 0.1, 0.5, 0.9] {
            // Five standard deviations of the share of n independent draws.
            let bound = 5.0 * (p * (1.0 - p) / n as f64).sqrt();
            let kept = share(key, 1, 2, p);
            assert!((kept - (1.0 - p)).abs() <= bound, "p {p}: kept {kept}");
        }
        // Changing any one coordinate gives a mask that agrees as often as an independent one.
        let mut others: Vec<([i32; 5], u32, u64)> = vec![(key, 2, 2), (key, 1, 3)];
        for word in 0..5 {
            let mut changed = key;
            changed[word] += 1;
            others.push((changed, 1, 2));
        }
        for (other, site, row) in others {
            let agree = (0..n)
                .filter(|&i| keeps(key, 1, 2, i, 0.5) == keeps(other, site, row, i, 0.5))
                .count();
            let share = agree as f64 / n as f64;
            assert!((share - 0.5).abs() < 0.01, "{other:?} {site} {row}: {share}");
        }
    }

    #[test]
    fn masks_follow_the_global_sample() {
        let (first, second) = ([1, 2, 3, 4, 0], [1, 2, 3, 4, 8]);
        for i in 0..64 {
            assert_eq!(
                keeps(first, 9, 11, i, 0.3),
                keeps(second, 9, 3, i, 0.3),
                "row 11 of the first micro-batch is row 3 of the one that begins at sample 8"
            );
        }
    }

    #[test]
    fn mask_words_are_philox_of_the_documented_counter() {
        let words = mask_words([1, -2, 3, 4, 5], 6, 7, (8 << 32) | 9);
        let counter = [9, 12 ^ 8, 3, 6 | 4 << 16];
        assert_eq!(words, philox([1, u32::MAX - 1], counter));
        let key = [1, -2, 3, 4, 5];
        for element in 0..8 {
            let word = mask_words(key, 6, 7, element / 4)[element as usize % 4];
            // With p just at the word's own place the element is kept, with p above it dropped.
            let p = f64::from(word) / 2f64.powi(32);
            assert!(keeps(key, 6, 7, element, p));
            assert!(!keeps(key, 6, 7, element, p + 2f64.powi(-33)));
        }
    }
}
