//! What is made once for a kind of GPU and kept on disk: compiled kernels, and the algorithms of products.
//!
//! A file is named by a hash of what it was made from, and begins with a hash of what it holds, so a
//! file that was cut short or changed is not used. A cache that cannot be written only costs time.

use std::fs;
use std::path::PathBuf;

use phalanx_ir::random::fnv1a;
use phalanx_sys::disk::write_atomic;

const MAGIC: &[u8; 8] = b"PHXKEPT1";

/// The name of the file for what is made from these texts.
pub(crate) fn key(kind: &str, texts: &[&str]) -> String {
    let mut all = Vec::new();
    for text in texts {
        all.extend(text.len().to_le_bytes());
        all.extend(text.as_bytes());
    }
    // Two hashes of different texts: 64 bits alone may collide by chance in a long-lived cache.
    let first = fnv1a(&all);
    all.extend(first.to_le_bytes());
    all.reverse();
    format!("{first:016x}{:016x}.{kind}", fnv1a(&all))
}

/// A folder of such files; nothing is kept without one.
pub(crate) struct Cache(Option<PathBuf>);

impl Cache {
    /// In `$PHALANX_CACHE`, or where the user's caches are.
    pub(crate) fn here() -> Self {
        let given =
            |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let user = || given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
        let folder = given("PHALANX_CACHE").or_else(|| Some(user()?.join("phalanx")));
        Self(folder.map(|folder| folder.join("kernels")))
    }

    #[cfg(test)]
    pub(crate) fn at(folder: Option<PathBuf>) -> Self {
        Self(folder)
    }

    /// What was kept under a name, if it is whole.
    pub(crate) fn find(&self, key: &str) -> Option<Vec<u8>> {
        opened(&fs::read(self.0.as_ref()?.join(key)).ok()?)
    }

    /// Keeps bytes under a name.
    pub(crate) fn keep(&self, key: &str, bytes: &[u8]) {
        let Some(folder) = &self.0 else { return };
        if fs::create_dir_all(folder).is_ok() {
            // A full or read-only disk is no reason to stop: the next run makes it again.
            drop(write_atomic(&folder.join(key), |file| file.write_all(&sealed(bytes))));
        }
    }

    /// A lock that one process of this host has at a time, until it is dropped; nothing if the cache cannot be written.
    pub(crate) fn lock(&self, name: &str) -> Option<fs::File> {
        let folder = self.0.as_ref()?;
        fs::create_dir_all(folder).ok()?;
        let file = fs::File::create(folder.join(name)).ok()?;
        file.lock().ok()?;
        Some(file)
    }
}

fn sealed(body: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &fnv1a(body).to_le_bytes(), body].concat()
}

fn opened(file: &[u8]) -> Option<Vec<u8>> {
    let (hash, body) = file.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    (fnv1a(body) == u64::from_le_bytes(*hash)).then(|| body.to_vec())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_not_used() {
        let file = sealed(&[1, 2, 3]);
        assert_eq!(opened(&file), Some(vec![1, 2, 3]));
        for at in 0..file.len() {
            let mut other = file.clone();
            other[at] ^= 1;
            assert_eq!(opened(&other), None, "byte {at}");
            assert_eq!(opened(&file[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn keys_follow_every_text() {
        let texts: [&[&str]; 4] = [&["a", "b"], &["ab", ""], &["a", "c"], &["a", "b", ""]];
        let keys = texts.map(|texts| key("cubin", texts));
        let mut sorted = keys.to_vec();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), keys.len());
    }
}
