//! The invariants of ARCHITECTURE.md that a machine can check: which way dependencies point, what
//! pure crates stay away from, where safety arguments are needed, and that types fall back on nothing.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Every crate with its height: dependencies point to lower ones.
const HEIGHTS: [(&str, u32); 29] = [
    ("phalanx-ir", 0),
    ("phalanx-sys", 0),
    ("phalanx-recovery", 0),
    ("phalanx-call", 1),
    ("phalanx-cost", 1),
    ("phalanx-autodiff", 1),
    ("phalanx-passes", 1),
    ("phalanx-models", 1),
    ("phalanx-data", 1),
    ("phalanx-comm", 2),
    ("phalanx-spmd", 2),
    ("phalanx-script", 3),
    ("phalanx-pipeline", 4),
    ("phalanx-sim", 4),
    ("phalanx-engine", 2),
    ("phalanx-reference", 5),
    ("phalanx-cpu", 5),
    ("phalanx-cuda", 5),
    ("phalanx-runtime", 5),
    ("phalanx-testing", 6),
    ("phalanx-error", 6),
    ("phalanx-checkpoint", 7),
    ("phalanx-config", 7),
    ("phalanx-session", 8),
    ("phalanx-inspect", 9),
    ("phalanx-bench", 9),
    ("phalanx-train", 10),
    ("phalanx", 11),
    ("phalanx-cli", 12),
];

/// Crates that do no I/O, spawn no threads and need no safety arguments.
const PURE: [&str; 12] = [
    "ir",
    "call",
    "cost",
    "autodiff",
    "passes",
    "spmd",
    "script",
    "pipeline",
    "sim",
    "engine",
    "reference",
    "recovery",
];

/// Crates that may ask the compiler to trust them.
const TRUSTED: [&str; 4] = ["comm", "cpu", "cuda", "sys"];

/// The word itself, in two pieces, so that this file does not hold it.
const WORD: &str = concat!("un", "safe");

/// Crates in which a wrong type must stop the program: a plausible default would be trained with.
const STRICT: [&str; 3] = ["ir", "spmd", "script"];

/// What turns an error, or nothing, into something plausible. Use an error that carries the values,
/// or `expect` with the invariant as a sentence.
const FALLBACKS: [&str; 10] = [
    "unwrap_or_default",
    "or_else(|_",
    ".ok()",
    "Result::ok",
    "let Ok(",
    "Err(_)",
    "unwrap_or(0)",
    "unwrap_or(1)",
    "map_or(0,",
    "map_or(1,",
];

/// The lines that may: file, a piece of the line, and why nothing is a right answer there.
const ALLOWED: &[(&str, &str, &str)] = &[
    ("ir/src/rule/check.rs", "factors.get(at).map_or(1,", "a dim without factors has one element"),
    ("spmd/src/emit.rs", "get(&key).map_or(0, Vec::len)", "nothing crossed yet"),
    ("spmd/src/plan.rs", "pin.map_or(0, |p| p.closed)", "without a pin no axis is closed"),
    ("spmd/src/padding.rs", "max().unwrap_or(0)", "no places, no factors"),
    (
        "spmd/src/strategies/tensor_plan.rs",
        "find_map(|i| summed(&i.op)).unwrap_or(0)",
        "a table that no product reads is cut along its first dim",
    ),
    ("script/src/memory.rs", "*c == category).map_or(0,", "nothing of the category"),
    ("script/src/memory.rs", "fixed.unwrap_or(0)", "not fixed: starts at the front"),
    ("script/src/memory.rs", "max().unwrap_or(0)", "no buffers, no bytes"),
    ("script/src/memory.rs", "|r| script.programs[r.program.0].slots()", "no run, no workspace"),
];

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
fn four_crates_ask_to_be_trusted() {
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

/// Lines of code outside tests that fall back on something plausible.
fn fallbacks(text: &str) -> Vec<&str> {
    // Tests are at the bottom of a file.
    let code = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
    let code = code.filter(|line| !line.trim_start().starts_with("//"));
    code.filter(|line| FALLBACKS.iter().any(|word| line.contains(word))).collect()
}

#[test]
fn types_fall_back_on_nothing() {
    let mut unused: Vec<(&str, &str)> = ALLOWED.iter().map(|(f, piece, _)| (*f, *piece)).collect();
    for krate in STRICT {
        for (path, text) in sources(krate) {
            for line in fallbacks(&text) {
                let allows =
                    |(file, piece): (&str, &str)| path.ends_with(file) && line.contains(piece);
                assert!(
                    ALLOWED.iter().any(|&(file, piece, _)| allows((file, piece))),
                    "{}: `{}` hides what went wrong\n  usual fix: an error that carries the values, or \
                     expect(\"the invariant, as a sentence\")",
                    path.display(),
                    line.trim()
                );
                unused.retain(|&entry| !allows(entry));
            }
        }
    }
    assert_eq!(unused, [], "no such line is left: remove it from ALLOWED");
}

#[test]
fn a_planted_fallback_is_found() {
    for planted in [
        "    let layout = Layout::new(dims, partial).unwrap_or_default();",
        "    let layout = Layout::new(dims, partial).unwrap_or_else(|_| Layout::replicated(1));",
        "    let assignment = rule.check(mesh, &ins, &outs).ok()?;",
        "            .ok()",
        "    let known = all.filter_map(Result::ok);",
        "    let Ok(layout) = Layout::new(dims, partial) else { return Layout::default() };",
        "    let n = mesh.size(axis).unwrap_or(1);",
        "    let n = mesh.expand(axis).map_or(1, |a| mesh.count(&a));",
    ] {
        let file =
            format!("//! An idea.\nfn f() {{\n{planted}\n}}\n#[cfg(test)]\nmod tests {{}}\n");
        assert_eq!(fallbacks(&file), [planted]);
    }
    assert!(fallbacks("    // not unwrap_or(0)\n#[cfg(test)]\n x.ok()\n").is_empty());
}
