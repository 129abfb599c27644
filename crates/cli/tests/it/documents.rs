//! What the documentation shows is what the command prints today.
//!
//! In a fenced block marked `console`, a line `$ phalanx …` is a command and what follows is its
//! output, whole, or as much of it as the command's `| grep -E 'this|that'` leaves. Run the test with
//! `UPDATE_DOCS=1` to write the outputs anew after a deliberate change, and read the difference.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::phalanx;

#[test]
fn consoles_in_the_documentation_show_what_is_printed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut commands, mut outdated) = (0, Vec::new());
    for page in pages(&root.join("docs")) {
        let text = fs::read_to_string(&page).unwrap();
        let (renewed, count) = renew(&text);
        commands += count;
        if renewed == text {
            continue;
        }
        match std::env::var_os("UPDATE_DOCS") {
            Some(_) => fs::write(&page, renewed).unwrap(),
            None => {
                outdated.push(format!("{}:\n{}", page.display(), first_change(&text, &renewed)))
            }
        }
    }
    assert!(commands >= 16, "only {commands} commands were found");
    assert!(outdated.is_empty(), "{}\nUPDATE_DOCS=1 writes them anew", outdated.join("\n"));
}

/// Every system has a page, and the index names it.
#[test]
fn every_system_has_a_page_in_the_index() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let index = fs::read_to_string(root.join("docs/systems/README.md")).unwrap();
    let helpers = ["mod", "find", "data", "parts", "vee_block", "rolling", "round_robin"];
    let folders = ["crates/spmd/src/strategies", "crates/pipeline/src/schedules"];
    let mut found = 0;
    for file in folders.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap()) {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if helpers.contains(&name) {
            continue;
        }
        let page = match name {
            "weight_update" => "weight_update_sharding",
            "ring" => "ring_attention",
            _ if name.starts_with("zb_") => "zero_bubble",
            "v_min" => "v_half",
            other => other,
        };
        assert!(index.contains(&format!("({page}.md)")), "{page} is not in the index");
        assert!(root.join(format!("docs/systems/{page}.md")).is_file(), "{page} has no page");
        found += 1;
    }
    assert!(found >= 9 + 8, "only {found} systems were found");
}

/// Pages that say whole: a picture, the program or what a command prints of it, the closed form, and when to use it.
#[test]
fn pages_of_shapes_rings_and_replicas_have_every_part() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/systems");
    for page in [
        "optimus",
        "cube",
        "gspmd",
        "ring_attention",
        "rsa",
        "operator_parallel",
        "data_parallel",
        "local_sgd",
        "f16",
        "optimizers",
    ] {
        let text = fs::read_to_string(folder.join(format!("{page}.md"))).unwrap();
        for (part, words) in [
            ("a picture", &["```text", "!["][..]),
            ("a program", &["```console\n$ phalanx explain", "(a test of `"]),
            ("a closed form", &["**Formulas.**"]),
            ("when to use it", &["**When.**", "## When to use it"]),
        ] {
            assert!(words.iter().any(|word| text.contains(word)), "{page}.md has not {part}");
        }
    }
}

fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages.extend(self::pages(&path));
        } else if path.extension().is_some_and(|ending| ending == "md") {
            pages.push(path);
        }
    }
    pages.sort();
    pages
}

/// The page with the outputs of today, and how many commands it has.
fn renew(text: &str) -> (String, usize) {
    let (mut renewed, mut commands) = (String::new(), 0);
    let (mut console, mut output) = (false, false);
    for line in text.lines() {
        if line.starts_with("```") {
            (console, output) = (line == "```console", false);
        }
        if console && line.starts_with("$ phalanx ") {
            renewed += &format!("{line}\n{}", answer(line));
            output = true;
            commands += 1;
        } else if !output {
            renewed += &format!("{line}\n");
        }
    }
    (renewed, commands)
}

/// What a command line prints.
fn answer(line: &str) -> String {
    let line = line.trim_start_matches("$ phalanx ");
    let (command, wanted) = match line.split_once(" | grep -E '") {
        Some((command, wanted)) => (command, Some(wanted.trim_end_matches('\''))),
        None => (line, None),
    };
    // So that the real grep, with which a reader may try it, does the same.
    let special = ['(', ')', '[', '*', '+', '?', '^', '\\'];
    assert!(!wanted.is_some_and(|w| w.contains(special)), "{line}: grep for plain words only");
    let dir = tempfile::tempdir().unwrap();
    let arguments = arguments(command);
    let printed = phalanx(dir.path(), &[&arguments]).ok().out;
    let kept = printed.lines().filter(|line| {
        wanted.is_none_or(|wanted| wanted.split('|').any(|word| line.contains(word)))
    });
    kept.map(|line| format!("{}\n", line.trim_end())).collect()
}

/// The arguments of a command line, as a shell splits them; only single quotes are known.
fn arguments(command: &str) -> Vec<&str> {
    let pieces = command.split('\'').enumerate();
    let words = pieces.flat_map(|(at, piece)| match at % 2 {
        0 => piece.split_whitespace().collect(),
        _ => vec![piece],
    });
    words.collect()
}

fn first_change(old: &str, new: &str) -> String {
    let change = old.lines().zip(new.lines()).find(|(a, b)| a != b);
    change.map_or("  other length".to_owned(), |(old, new)| format!("- {old}\n+ {new}"))
}
