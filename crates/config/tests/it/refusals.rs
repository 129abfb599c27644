//! What a user reads after a mistake in a configuration, word by word.
//!
//! `refusals.txt` holds the cases. Each starts with `===`, then comes the file, then lines with
//! `--set` options, and after `---` what is printed. Run the test with `UPDATE_REFUSALS=1` to
//! write the file anew after a deliberate change, and read the difference.

use std::fmt::Write;

use phalanx_config::{Config, Sources};

#[test]
fn every_refusal_says_what_where_and_what_would_work() {
    let expected = include_str!("refusals.txt");
    let mut actual = String::new();
    for case in expected.split("===\n").filter(|case| !case.is_empty()) {
        let (input, _) = case.split_once("---\n").expect("a case has a line of three dashes");
        let is_set = |line: &&str| line.starts_with("--set ");
        let toml: Vec<&str> = input.lines().filter(|line| !is_set(line)).collect();
        let sets = input.lines().filter_map(|line| line.strip_prefix("--set "));
        let said = refusal(&toml.join("\n"), sets);
        writeln!(actual, "===\n{input}---\n{said}").unwrap();
    }
    if std::env::var_os("UPDATE_REFUSALS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/refusals.txt");
        std::fs::write(path, &actual).unwrap();
        return;
    }
    let differing = actual.split("===\n").zip(expected.split("===\n")).find(|(a, e)| a != e);
    if let Some((actual, expected)) = differing {
        panic!(
            "the first case that differs:\n{actual}\nexpected:\n{expected}\n\
             if the change is meant: UPDATE_REFUSALS=1 cargo test -p phalanx-config"
        );
    }
}

/// The refusal of a file `config.toml` with this text and these `--set` options.
fn refusal<'a>(toml: &str, sets: impl Iterator<Item = &'a str>) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(&path, toml).unwrap();
    let sources = sets.fold(Sources::default().file(&path), |sources, set| sources.set(set));
    let error = Config::load(&sources).expect_err(toml);
    assert_eq!(error.exit_code(), 2);
    let prefix = format!("{}/", dir.path().display());
    error.to_string().replace(&prefix, "")
}

#[test]
fn a_missing_file_and_an_unknown_preset_are_refused() {
    let message = |sources: Sources| Config::load(&sources).unwrap_err().to_string();
    let missing = message(Sources::default().file("no/such/config.toml"));
    assert!(missing.starts_with("error: no/such/config.toml: no such file\n"), "{missing}");
    let fix = "\n  usual fix: check the path, or start from a preset: --preset default | tiny | \
               tiny-moe | bench-13m | bench-moe | gpt2-124m | llama-0.95b | mnist-cnn";
    assert!(missing.ends_with(fix), "{missing}");
    assert!(message(Sources::default().file("tiny")).ends_with("--preset tiny"));
    assert_eq!(
        message(Sources::default().preset("tiyn")),
        "error: there is no preset `tiyn`\n  presets: default, tiny, tiny-moe, bench-13m, \
         bench-moe, gpt2-124m, llama-0.95b, mnist-cnn\n  did you mean `tiny`?"
    );
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
    let error = Config::load(&Sources::default().file(&path)).unwrap_err();
    assert!(error.to_string().contains("config.toml"), "{error}");
}

/// No text, however odd, makes the reader panic.
#[test]
fn mutilated_files_are_refused_or_read_but_never_panic() {
    let whole = Config::load(&Sources::default()).unwrap().config.to_toml();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    for cut in (0..whole.len()).step_by(29) {
        for replacement in ["", "\"", "=", "[", "9999999999999999999", "-", "\u{1F980}", "\n"] {
            let text = format!("{}{replacement}{}", &whole[..cut], &whole[cut + 1..]);
            std::fs::write(&path, text).unwrap();
            if let Err(error) = Config::load(&Sources::default().file(&path)) {
                assert!(!error.problems().is_empty());
            }
        }
    }
}
