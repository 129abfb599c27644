//! One meaning per word: no two public types of one name in two crates, no odd words in what people
//! read, no file that is too long to read.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The longest that a source file may be, in lines.
const LONGEST: usize = 450;

/// Names that several crates may have: what a crate's users expect under this name in every crate.
const SHARED: [&str; 1] = ["Result"];

/// Words that were once used here and that nobody in the trade uses, or that only a native reader
/// understands, and what to write instead.
const BANNED: [(&str, &str); 18] = [
    ("astray", "a mismatch"),
    ("for ever", "without end"),
    ("whoever", "the caller"),
    ("somebody", "a rank, a user, a caller"),
    ("everybody", "all ranks"),
    ("unless told", "by default"),
    ("laid on", "partitioned over"),
    ("dealt", "distributed"),
    ("vouches", "guarantees"),
    ("burnt", "spent in busy waiting"),
    ("there and back", "forward and backward"),
    ("in a circle", "in a cycle"),
    ("if need be", "if necessary"),
    ("is no number", "is not a number"),
    ("under way", "in flight"),
    ("unheard", "without effect"),
    ("in the mean", "on average"),
    ("how-manieth", "the number of"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Files below a folder whose names end like this.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true if !path.ends_with("target") => folders.push(path),
                false if path.extension().is_some_and(|e| e == extension) => found.push(path),
                _ => {}
            }
        }
    }
    found
}

/// By crate: the source files of the library or command.
fn sources() -> BTreeMap<String, Vec<(PathBuf, String)>> {
    let crates = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        (path, text)
    };
    crates
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, files(&path.join("src"), "rs").into_iter().map(read).collect())
        })
        .collect()
}

/// Tests are at the bottom of a file.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or(text)
}

/// The public types that a file declares, also by the macros of the configuration.
fn types(text: &str) -> impl Iterator<Item = &str> {
    let kinds = ["pub struct ", "pub enum ", "pub trait ", "pub type "];
    without_tests(text).lines().filter_map(move |line| {
        let line = line.trim_start();
        let rest = kinds.iter().find_map(|kind| line.strip_prefix(kind))?;
        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|n| !n.is_empty())
    })
}

#[test]
fn a_public_type_has_a_name_of_its_own() {
    let mut crates: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (krate, sources) in sources() {
        for (path, text) in sources {
            for name in types(&text).filter(|name| !SHARED.contains(name)) {
                let place = format!("{krate} ({})", path.file_name().unwrap().display());
                crates.entry(name.to_owned()).or_default().push(place);
            }
        }
    }
    assert!(crates.len() > 400, "only {} types were found", crates.len());
    let doubled: Vec<String> = (crates.iter())
        .filter(|(_, places)| places.len() > 1)
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    assert!(doubled.is_empty(), "rename all but one of each:\n{}", doubled.join("\n"));
}

#[test]
fn files_can_be_read_in_one_go() {
    for path in files(&root().join("crates"), "rs") {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= LONGEST, "{} has {lines} lines: find its parts", path.display());
    }
}

/// Comments and string literals of Rust text. Lines are joined, because phrases wrap.
fn prose(text: &str) -> String {
    let mut words = String::new();
    for line in text.lines() {
        let line = line.trim_start();
        let comment = line.strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']));
        match comment {
            Some(comment) => words += comment,
            None => {
                for literal in line.split('"').skip(1).step_by(2) {
                    words += literal;
                    words.push(' ');
                }
            }
        }
        words.push(' ');
    }
    words
}

/// The banned words in a text.
fn banned(prose: &str) -> Vec<(&'static str, &'static str)> {
    let plain: String = prose.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
    let whole = |at: usize, word: &str| {
        let letter = |c: Option<char>| c.is_some_and(char::is_alphabetic);
        !letter(plain[..at].chars().next_back()) && !letter(plain[at + word.len()..].chars().next())
    };
    let found = |word: &str| plain.match_indices(word).any(|(at, _)| whole(at, word));
    BANNED.into_iter().filter(|(word, _)| found(word)).collect()
}

#[test]
fn odd_words_stay_out() {
    let mut wrong = Vec::new();
    let mut look = |path: &Path, prose: &str| {
        let words = banned(prose).into_iter();
        wrong.extend(
            words.map(|(word, better)| format!("{}: `{word}`, write {better}", path.display())),
        );
    };
    for (path, text) in sources().into_values().flatten() {
        look(&path, &prose(without_tests(&text)));
    }
    let pages = files(&root().join("docs"), "md").into_iter();
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root().join(name));
    for path in pages.chain(top) {
        look(&path, &fs::read_to_string(&path).unwrap());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn planted_words_and_names_are_found() {
    let text = "//! What would go\n//! astray.\nfn f() { g(\"It waits for\\\n for ever\") }\n";
    assert_eq!(banned(&prose(text))[0].0, "astray");
    assert!(banned("a lastray is no word of the list").is_empty());
    assert_eq!(banned("Ranks wait for\n  ever.").len(), 1);
    let text = "pub struct A<T>(T);\n    pub enum B {\n#[cfg(test)]\npub struct C;\n";
    assert_eq!(types(text).collect::<Vec<_>>(), ["A", "B"]);
}
