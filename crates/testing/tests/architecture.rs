//! The invariants of ARCHITECTURE.md that a machine can check: which way dependencies point, what
//! pure crates stay away from, and where safety arguments are needed.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Every crate with its height: dependencies point to lower ones.
const HEIGHTS: [(&str, u32); 19] = [
    ("phalanx-ir", 0),
    ("phalanx-sys", 0),
    ("phalanx-call", 1),
    ("phalanx-autodiff", 1),
    ("phalanx-passes", 1),
    ("phalanx-models", 1),
    ("phalanx-data", 1),
    ("phalanx-comm", 2),
    ("phalanx-spmd", 2),
    ("phalanx-script", 3),
    ("phalanx-pipeline", 4),
    ("phalanx-engine", 2),
    ("phalanx-reference", 5),
    ("phalanx-cpu", 5),
    ("phalanx-runtime", 5),
    ("phalanx-testing", 6),
    ("phalanx-train", 7),
    ("phalanx", 8),
    ("phalanx-cli", 9),
];

/// Crates that do no I/O, spawn no threads and need no safety arguments.
const PURE: [&str; 9] =
    ["ir", "call", "autodiff", "passes", "spmd", "script", "pipeline", "engine", "reference"];

/// Crates that may ask the compiler to trust them.
const TRUSTED: [&str; 3] = ["comm", "cpu", "sys"];

/// The word itself, in two pieces, so that this file does not hold it.
const WORD: &str = concat!("un", "safe");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every source file of a crate, with its text.
fn sources(krate: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("crates").join(krate).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    assert!(!found.is_empty(), "{krate} has no source");
    found
}

#[test]
fn dependencies_point_downwards() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let height = |name: &str| HEIGHTS.iter().find(|(n, _)| *n == name).map(|(_, h)| *h);
    let packages = metadata["packages"].as_array().unwrap();
    assert_eq!(packages.len(), HEIGHTS.len(), "every crate has its height here");
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let own = height(name).unwrap_or_else(|| panic!("{name} has no height"));
        for dependency in package["dependencies"].as_array().unwrap() {
            let (other, normal) =
                (dependency["name"].as_str().unwrap(), dependency["kind"].is_null());
            if let (Some(below), true) = (height(other), normal) {
                assert!(below < own, "{name} must not depend on {other}");
            }
        }
    }
}

#[test]
fn pure_crates_stay_pure() {
    for krate in PURE {
        for (path, text) in sources(krate) {
            for word in ["std::fs", "std::net", "std::process", "std::thread", "std::env"] {
                assert!(!text.contains(word), "{} uses {word}", path.display());
            }
        }
        let lib = root().join("crates").join(krate).join("src/lib.rs");
        let forbids = format!("#![forbid({WORD}_code)]");
        assert!(fs::read_to_string(lib).unwrap().contains(&forbids), "{krate}");
    }
}

#[test]
fn three_crates_ask_to_be_trusted() {
    for folder in fs::read_dir(root().join("crates")).unwrap() {
        let krate = folder.unwrap().file_name().into_string().unwrap();
        if TRUSTED.contains(&krate.as_str()) {
            continue;
        }
        for (path, text) in sources(&krate) {
            let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
            let found = code.filter(|l| l.contains(WORD) && !l.contains("forbid"));
            assert_eq!(found.count(), 0, "{} asks to be trusted", path.display());
        }
    }
}
