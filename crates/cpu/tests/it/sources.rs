//! What sources must be like for kernels to be fast.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

/// Calls of `vectorized` whose closure the compiler may leave outside: it is then compiled for any processor.
fn not_inlined(text: &str) -> Vec<&str> {
    let calls = text.match_indices("vectorized(").map(|(at, call)| &text[at + call.len()..]);
    let starts = |rest: &&str| {
        let closure = rest.trim_start();
        let inlined = closure.starts_with("inlined!(") || closure.starts_with("#[inline(always)]");
        !inlined
    };
    calls.filter(starts).map(|rest| rest.lines().next().unwrap_or("")).collect()
}

#[test]
fn vectorised_closures_are_inlined() {
    let mut paths = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut paths);
    assert!(paths.len() > 50);
    let mut calls = 0;
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        calls += text.matches("vectorized(").count();
        assert!(not_inlined(&text).is_empty(), "{}: {:?}", path.display(), not_inlined(&text));
    }
    assert!(calls > 50, "only {calls} calls were found");
    assert_eq!(not_inlined("vectorized(|| 1)\nvectorized(\n #[inline(always)]\n || 2)"), ["|| 1)"]);
}
