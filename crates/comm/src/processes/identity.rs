//! What makes two processes the same program on the same kind of processor.
//!
//! Messages have the form of one build, and equal work must round equally on every rank: so ranks of
//! another build, or with other vector instructions, are refused when they meet.

use std::fs::File;
use std::io::Read;
use std::sync::OnceLock;

/// A number that differs between builds: a hash of the running program's file.
pub(super) fn build() -> u64 {
    static BUILD: OnceLock<u64> = OnceLock::new();
    *BUILD.get_or_init(|| {
        let version = hash(env!("CARGO_PKG_VERSION").as_bytes(), 0);
        // Where the file cannot be read, versions alone are compared.
        hash_file("/proc/self/exe").map_or(version, |file| file ^ version)
    })
}

fn hash_file(path: &str) -> Option<u64> {
    let (mut file, mut room) = (File::open(path).ok()?, vec![0; 1 << 20]);
    let mut total = 0;
    loop {
        let mut held = 0;
        while held < room.len() {
            match file.read(&mut room[held..]).ok()? {
                0 => break,
                count => held += count,
            }
        }
        total = hash(&room[..held], total);
        if held < room.len() {
            return Some(total);
        }
    }
}

/// A hash that finds changes, at the speed of memory; it is no protection against intent.
pub(super) fn hash(bytes: &[u8], seed: u64) -> u64 {
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

/// The vector instructions that kernels choose by.
const UNITS: [&str; 4] = ["avx2", "fma", "avx512f", "avx512bw"];

/// Which of [`UNITS`] this processor has, as bits.
pub(super) fn units() -> u32 {
    #[cfg(target_arch = "x86_64")]
    let found = [
        std::is_x86_feature_detected!("avx2"),
        std::is_x86_feature_detected!("fma"),
        std::is_x86_feature_detected!("avx512f"),
        std::is_x86_feature_detected!("avx512bw"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let found = [false; UNITS.len()];
    found.iter().enumerate().map(|(bit, &has)| u32::from(has) << bit).sum()
}

/// The names of units.
pub(super) fn unit_names(units: u32) -> String {
    let has = |bit: &usize| units & (1 << bit) != 0;
    let names: Vec<&str> = (0..UNITS.len()).filter(has).map(|bit| UNITS[bit]).collect();
    if names.is_empty() { "no vector units".to_owned() } else { names.join("+") }
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
        assert_eq!(build(), build());
        assert_eq!(unit_names(0b101), "avx2+avx512f");
    }
}
