//! Compiled kernels on disk.
//!
//! A file is named by a hash of what it was made from, and begins with a hash of what it holds, so a
//! file that was cut short or changed is not used. A cache that cannot be written only costs time.

use std::fs;
use std::path::PathBuf;

use phalanx_ir::random::fnv1a;
use phalanx_sys::disk::write_atomic;

use super::Cubin;

const MAGIC: &[u8; 8] = b"PHXCUBN1";

/// The name of the file for code that is made from these texts.
pub(super) fn key(texts: &[&str]) -> String {
    let mut all = Vec::new();
    for text in texts {
        all.extend(text.len().to_le_bytes());
        all.extend(text.as_bytes());
    }
    // Two hashes of different texts: 64 bits alone may collide by chance in a long-lived cache.
    let first = fnv1a(&all);
    all.extend(first.to_le_bytes());
    all.reverse();
    format!("{first:016x}{:016x}.cubin", fnv1a(&all))
}

/// What was kept under a name, if it is whole and has this many kernels.
pub(super) fn find(key: &str, kernels: usize) -> Option<Cubin> {
    let bytes = fs::read(folder()?.join(key)).ok()?;
    decoded(&bytes).filter(|cubin| cubin.names.len() == kernels)
}

/// Keeps compiled code.
pub(super) fn keep(key: &str, cubin: &Cubin) {
    let Some(folder) = folder() else { return };
    if fs::create_dir_all(&folder).is_ok() {
        let bytes = encoded(cubin);
        // A full or read-only disk is no reason to stop: the next run compiles again.
        drop(write_atomic(&folder.join(key), |file| file.write_all(&bytes)));
    }
}

/// `$PHALANX_CACHE`, or where the user's caches are.
fn folder() -> Option<PathBuf> {
    let given = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let own = given("PHALANX_CACHE");
    let user = || given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
    own.or_else(|| Some(user()?.join("phalanx"))).map(|folder| folder.join("kernels"))
}

fn encoded(cubin: &Cubin) -> Vec<u8> {
    let mut body = Vec::new();
    let mut put = |bytes: &[u8]| {
        body.extend((bytes.len() as u64).to_le_bytes());
        body.extend(bytes);
    };
    put(cubin.names.join("\n").as_bytes());
    put(&cubin.bytes);
    let mut file = MAGIC.to_vec();
    file.extend(fnv1a(&body).to_le_bytes());
    file.extend(body);
    file
}

fn decoded(file: &[u8]) -> Option<Cubin> {
    let rest = file.strip_prefix(MAGIC)?;
    let (hash, body) = rest.split_first_chunk::<8>()?;
    if fnv1a(body) != u64::from_le_bytes(*hash) {
        return None;
    }
    let (names, rest) = piece(body)?;
    let (bytes, rest) = piece(rest)?;
    let names = std::str::from_utf8(names).ok()?.lines().map(str::to_owned).collect();
    rest.is_empty().then(|| Cubin { names, bytes: bytes.to_vec() })
}

fn piece(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_not_used() {
        let cubin = Cubin { names: vec!["a".to_owned(), "b".to_owned()], bytes: vec![1, 2, 3] };
        let file = encoded(&cubin);
        assert_eq!(decoded(&file), Some(cubin));
        for at in 0..file.len() {
            let mut other = file.clone();
            other[at] ^= 1;
            assert_eq!(decoded(&other), None, "byte {at}");
            assert_eq!(decoded(&file[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn keys_follow_every_text() {
        let keys = [key(&["a", "b"]), key(&["ab", ""]), key(&["a", "c"]), key(&["a", "b", ""])];
        let mut sorted = keys.to_vec();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), keys.len());
    }
}
