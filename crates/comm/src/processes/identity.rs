//! What makes two processes the same program on the same kind of processor.
//!
//! Messages have the form of one build, and equal work must round equally on every rank: so ranks of
//! another build, or with other vector instructions, are refused when they meet.

use std::fs::File;
use std::io::Read;
use std::sync::OnceLock;

use super::build_id::build_id;
use crate::hash::hash;

/// A number that differs between builds: of what the linker wrote into the running program, else of its whole file.
pub fn build() -> u64 {
    const OWN: &str = "/proc/self/exe";
    static BUILD: OnceLock<u64> = OnceLock::new();
    *BUILD.get_or_init(|| {
        let version = hash(env!("CARGO_PKG_VERSION").as_bytes(), 0);
        let linked = build_id(OWN).map(|id| hash(&id, 0));
        // Where the file cannot be read, versions alone are compared.
        linked.or_else(|| hash_file(OWN)).map_or(version, |file| file ^ version)
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

/// What kernels choose by: vector instructions, and whose processor it is, because the fastest of them differ.
const UNITS: [&str; 8] =
    ["avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "amx-bf16", "amd"];

/// Which of [`UNITS`] this processor has, as bits.
pub(super) fn units() -> u32 {
    found().iter().enumerate().map(|(bit, &has)| u32::from(has) << bit).sum()
}

#[cfg(target_arch = "x86_64")]
fn found() -> [bool; UNITS.len()] {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX_BF16: u32 = 1 << 22;
    let name = __cpuid(0);
    [
        std::is_x86_feature_detected!("avx2"),
        std::is_x86_feature_detected!("fma"),
        std::is_x86_feature_detected!("avx512f"),
        std::is_x86_feature_detected!("avx512bw"),
        std::is_x86_feature_detected!("avx512vl"),
        std::is_x86_feature_detected!("avx512bf16"),
        name.eax >= 7 && __cpuid_count(7, 0).edx & AMX_BF16 != 0,
        [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD",
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn found() -> [bool; UNITS.len()] {
    [false; UNITS.len()]
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
    fn a_process_has_one_build_and_named_units() {
        assert_eq!(build(), build());
        assert_eq!(unit_names(0b101), "avx2+avx512f");
    }
}
