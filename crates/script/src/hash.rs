//! Tables whose keys are made by this crate: nobody can choose keys that collide, so a fast hash is
//! enough. A script has tens of thousands of buffers, each of which is looked up several times.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map with a quick hash.
pub(crate) type QuickMap<K, V> = HashMap<K, V, BuildHasherDefault<Quick>>;

/// A set with a quick hash.
pub(crate) type QuickSet<K> = HashSet<K, BuildHasherDefault<Quick>>;

/// Multiplies by an odd number for each value that is added.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quick(u64);

impl Quick {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.add(u64::from(byte));
    }

    fn write_usize(&mut self, word: usize) {
        self.add(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.add(word as u64);
    }

    /// A product is mixed best in its upper bits, but tables use the lower ones too.
    fn finish(&self) -> u64 {
        self.0 ^ self.0.rotate_left(32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::hash::{BuildHasher, BuildHasherDefault};

    use super::*;

    /// Small numbers side by side, as keys are, have lower bits of their own.
    #[test]
    fn neighbours_are_apart() {
        let build = BuildHasherDefault::<Quick>::default();
        for bits in [0, 57] {
            let mut found = BTreeSet::new();
            for instance in 0..64_usize {
                for microbatch in 0..64_usize {
                    let hash = build.hash_one((instance, "h", microbatch, false));
                    found.insert(if bits == 0 { hash & 0xfff } else { hash >> bits });
                }
            }
            // Of as many places as there are keys, 63% are taken by chance; of 128, all.
            assert!(found.len() > if bits == 0 { 2200 } else { 120 }, "{bits}: {}", found.len());
        }
    }
}
