//! A number that tells byte strings apart.

/// A hash that finds changes, at the speed of memory; it is no protection against intent.
pub(crate) fn hash(bytes: &[u8], seed: u64) -> u64 {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
    let mix = |lane: u64, word: u64| (lane ^ word).wrapping_mul(ODD).rotate_left(29);
    let mut lanes = [seed, seed ^ 1, seed ^ 2, seed ^ 3];
    let mut chunks = bytes.chunks_exact(32);
    for chunk in &mut chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(8)) {
            let mut own = [0; 8];
            own.copy_from_slice(word);
            *lane = mix(*lane, u64::from_le_bytes(own));
        }
    }
    let rest = chunks.remainder().iter().fold(bytes.len() as u64, |sum, &b| mix(sum, b.into()));
    lanes.into_iter().fold(rest, mix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_its_place_counts() {
        let bytes: Vec<u8> = (0..100).collect();
        let whole = hash(&bytes, 0);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(hash(&other, 0), whole, "{at}");
            assert_ne!(hash(&bytes[..at], 0), whole, "{at}");
        }
    }
}
