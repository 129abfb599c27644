//! The first five minutes: help, version, completions, what a run says, what survives a round trip.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::command::{SMALL, phalanx};

const COMMANDS: [&[&str]; 13] = [
    &[],
    &["train"],
    &["verify"],
    &["eval"],
    &["export"],
    &["explain"],
    &["bench"],
    &["bench", "step"],
    &["bench", "collectives"],
    &["bench", "partition"],
    &["schedule"],
    &["completions"],
    &["man"],
];

#[test]
fn help_fits_eighty_columns() {
    for command in COMMANDS {
        for flag in ["-h", "--help"] {
            let help = phalanx(Path::new("."), &[command, &[flag]]).ok().out;
            let long = help.lines().find(|line| line.chars().count() > 80);
            assert_eq!(long, None, "{command:?} {flag}");
        }
    }
}

#[test]
fn the_version_has_facts_of_the_build() {
    let version = phalanx(Path::new("."), &[&["--version"]]).ok().out;
    let words = ["phalanx 0.", "(commit ", std::env::consts::ARCH, "release)"];
    let words = words.iter().filter(|word| cfg!(not(debug_assertions)) || **word != "release)");
    assert!(words.clone().all(|word| version.contains(word)), "{version}");
    assert_eq!(phalanx(Path::new("."), &[&["-V"]]).ok().out.split_whitespace().count(), 2);
}

#[test]
fn shells_and_man_get_their_files() {
    let here = Path::new(".");
    for shell in ["bash", "zsh", "fish"] {
        let script = phalanx(here, &[&["completions", shell]]).ok().out;
        assert!(script.contains("schedule") && script.contains("microbatches"), "{script}");
    }
    for command in COMMANDS {
        let page = phalanx(here, &[&["man"], command]).ok().out;
        let title = [&["phalanx"], command].concat().join("-");
        assert!(page.contains(&format!(".TH {title} 1")), "{page}");
    }
    phalanx(here, &[&["man", "tarin"]]).refused(&["no command `tarin`", "train, verify"]);
    phalanx(here, &[&["completions", "dos"]]).refused(&["bash"]);
}

#[test]
fn numbers_that_are_none_are_refused_in_plain_words() {
    let here = Path::new(".");
    for bad in ["x", "-1", "0"] {
        phalanx(here, &[&["verify", "--steps", bad]]).refused(&["a whole number, 1 or more"]);
    }
    for bad in ["x", "-1"] {
        let args = ["schedule", "1f1b", "--microbatches", "2", "--stages", bad];
        phalanx(here, &[&args]).refused(&["write a whole number"]);
    }
}

#[test]
fn what_a_setting_drops_of_the_preset_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let steps = ["--set", "train.steps=1"];
    let told = phalanx(dir.path(), &[&["train"], SMALL, &steps]).ok().out;
    let note = "note   with model.ffn = 24, the layout of preset default is not used: ";
    assert!(told.contains(note), "{told}");
    let told = phalanx(dir.path(), &[&["explain", "--ranks"], SMALL]).ok();
    assert!(told.err.starts_with("note: with model.ffn = 24"), "{}", told.err);
    assert!(!told.out.contains("note"), "{}", told.out);
}

#[test]
fn the_header_comes_before_anything_is_measured_and_plans_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let two = ["--set", "train.steps=1", "--set", "parallel.dp=2"];
    let told = phalanx(dir.path(), &[&["train"], SMALL, &two]).ok().out;
    assert!(told.starts_with("config preset default\n"), "{told}");
    let total = told.lines().find(|line| line.starts_with("plan ")).unwrap();
    let total = total.split(" on each rank, ").nth(1).unwrap().split(" on all").next().unwrap();
    assert!(told.contains(&format!("(plan {total})")), "{told}");
    assert!(told.contains("% of GEMM rate"), "{told}");
}

const TEXT: &[&str] = &["--set", "data.kind=text", "--set", "data.path=a.txt"];

/// A run on a text file, in `dir`, as `runs/a`.
fn text_run(dir: &Path) -> String {
    fs::write(dir.join("a.txt"), "to be or not to be\n".repeat(60)).unwrap();
    let more = ["--set", "model.vocab=256", "--set", "train.steps=2", "--set", "run.name=a"];
    phalanx(dir, &[&["train"], SMALL, TEXT, &more]).ok().out
}

#[test]
fn text_is_evaluated_in_characters_and_perplexity() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let told = text_run(dir);
    assert!(told.contains("next: phalanx eval"), "{told}");
    assert!(!told.contains("your own text"), "{told}");
    let eval = ["eval", "--model", "run:runs/a"];
    let asked = phalanx(dir, &[&eval, &["--ids", "116,111,32"]]).ok().out;
    assert!(asked.contains("(perplexity "), "{asked}");
    let shown = asked.split("by logit: ").nth(1).unwrap();
    assert!(shown.contains('\'') || shown.contains(" 0x"), "{asked}");
    let held_out = phalanx(dir, &[&eval]).ok().out;
    assert!(held_out.contains("(perplexity "), "{held_out}");
}

#[test]
fn a_run_is_evaluated_from_any_folder() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    text_run(dir.path());
    let run = format!("run:{}", dir.path().join("runs/a").display());
    phalanx(other.path(), &[&["eval", "--model", &run]]).ok();
    // If the data are gone, the refusal says what to set.
    fs::remove_file(dir.path().join("a.txt")).unwrap();
    phalanx(other.path(), &[&["eval", "--model", &run]])
        .refused(&["a.txt: no such file", "--set data.path=FILE, where it is now"]);
}

#[test]
fn a_share_of_zero_holds_nothing_out() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // One sample of 16 tokens and its targets.
    fs::write(dir.join("a.txt"), "seventeen letters").unwrap();
    let more = ["--set", "model.vocab=256", "--set", "train.steps=1", "--set", "run.name=a"];
    let more = [&more[..], &["--set", "train.eval_every=0"]].concat();
    let none = ["--set", "data.val_fraction=0"];
    phalanx(dir, &[&["train"], SMALL, TEXT, &more])
        .refused(&["17 tokens", "one training and one evaluation sample"]);
    phalanx(dir, &[&["train"], SMALL, TEXT, &more, &none]).ok();
    phalanx(dir, &[&["eval", "--model", "run:runs/a"]])
        .refused(&["no part of the data is held out", "data.val_fraction=0.05"]);
}

/// A Hugging Face folder with a tokenizer, made from a run, whose configuration has `more`.
fn pretrained(dir: &Path, kind: &str, more: &Value) {
    let steps = ["--set", "train.steps=1", "--set", "run.name=first"];
    let kind = format!("model.kind={kind}");
    let small: Vec<&str> = SMALL
        .iter()
        .map(|s| if *s == "model.kv_heads=1" { "model.kv_heads=2" } else { s })
        .collect();
    phalanx(dir, &[&["train"], &small, &steps, &["--set", &kind]]).ok();
    let export = phalanx(dir, &[&["export", "--run", "runs/first", "--out", "hf"]]).ok().out;
    assert!(export.contains("no tokenizer: "), "{export}");
    let path = dir.join("hf/config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(&path, config.to_string()).unwrap();
    for name in ["tokenizer.json", "generation_config.json"] {
        fs::write(dir.join("hf").join(name), format!("{{\"name\": \"{name}\"}}")).unwrap();
    }
}

const FROM: &[&str] = &["--set", "model.from=hf:hf", "--set", "train.steps=1"];
const SHAPE: &[&str] =
    &["--set", "train.seq_len=16", "--set", "train.batch_size=8", "--set", "run.name=second"];

#[test]
fn a_round_trip_keeps_what_belongs_to_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let more = serde_json::json!({
        "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 5, "initializer_range": 0.03,
        "attention_dropout": 0.1,
    });
    pretrained(dir, "llama", &more);
    let told = phalanx(dir, &[&["train"], FROM, SHAPE]).ok().out;
    assert!(told.contains("attention_dropout = 0.1; this run trains with dropout 0"), "{told}");
    assert!(told.contains("optim.lr = 0.003 is meant for untrained weights"), "{told}");
    let export = phalanx(dir, &[&["export", "--run", "runs/second", "--out", "out"]]).ok().out;
    let copied = "copied from the folder of model.from: tokenizer.json, generation_config.json";
    assert!(export.contains(copied), "{export}");
    let config = fs::read_to_string(dir.join("out/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    for (key, value) in more.as_object().unwrap() {
        assert_eq!(config[key], *value, "{key}");
    }
    assert!(dir.join("out/tokenizer.json").is_file());
}

#[test]
fn the_dropout_of_a_folder_is_used_or_the_run_says_that_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let rates = ["resid_pdrop", "embd_pdrop", "attn_pdrop"];
    let more = rates.iter().map(|key| ((*key).to_owned(), 0.1.into())).collect();
    pretrained(dir, "gpt2", &Value::Object(more));
    let told = phalanx(dir, &[&["train"], FROM, SHAPE]).ok().out;
    assert!(told.contains("(--set model.dropout=0.1 trains with it)"), "{told}");
    let used = ["--set", "model.dropout=0.1", "--set", "optim.lr=1e-5"];
    let told = phalanx(dir, &[&["train"], FROM, SHAPE, &used]).ok().out;
    assert!(!told.contains("pdrop") && !told.contains("untrained"), "{told}");
    fs::write(dir.join("hf/config.json"), {
        let text = fs::read_to_string(dir.join("hf/config.json")).unwrap();
        text.replace("\"resid_pdrop\":0.1", "\"resid_pdrop\":1.5")
    })
    .unwrap();
    phalanx(dir, &[&["train"], FROM, SHAPE]).refused(&["resid_pdrop", "found 1.5"]);
}

#[test]
fn a_file_that_stands_in_for_another_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pretrained(dir, "llama", &serde_json::json!({}));
    let pointer =
        "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 9\n";
    let eval = || phalanx(dir, &[&["eval", "--model", "hf:hf", "--ids", "1,2"]]);
    let weights = dir.join("hf/model.safetensors");
    fs::write(&weights, pointer).unwrap();
    eval().refused(&["a pointer of git-lfs", "usual fix: git lfs pull"]);
    fs::write(&weights, "<!DOCTYPE html><html></html>").unwrap();
    eval().refused(&["a web page", "download it again"]);
    fs::write(dir.join("hf/config.json"), pointer).unwrap();
    eval().refused(&["config.json is a pointer of git-lfs"]);
    fs::write(dir.join("a.txt"), pointer).unwrap();
    phalanx(dir, &[&["train"], TEXT]).refused(&["a.txt is a pointer of git-lfs"]);
}

#[test]
fn text_of_a_user_cannot_command_the_terminal() {
    let here = Path::new(".");
    let sizes = ["--stages", "2", "--microbatches", "2"];
    let done = phalanx(here, &[&["schedule", "\u{1b}]0;x\u{7}"], &sizes]);
    done.refused(&["\\u{1b}]0;x\\u{7}"]);
    let done = phalanx(here, &[&["explain", "--set", "model.\u{1b}[31mred=3"]]);
    done.refused(&["model.\\u{1b}[31mred"]);
    let done = phalanx(here, &[&["verify", "--steps", "\u{1b}[31m"]]);
    done.refused(&["a whole number"]);
    assert!(!done.err.contains('\u{1b}'), "{}", done.err);
    let long = format!("model.{}=3", "x".repeat(60));
    assert!(phalanx(here, &[&["explain", "--set", &long]]).err.contains(&long.replace('=', " = ")));
}

#[test]
fn the_largest_token_is_named_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut ids = vec![7u16; 600];
    ids[500] = 300;
    ids[550] = 40_000;
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    fs::write(dir.join("a.u16"), bytes).unwrap();
    let tokens = ["--set", "data.kind=tokens", "--set", "data.path=a.u16"];
    phalanx(dir, &[&["train"], SMALL, &tokens]).refused(&[
        "token 300 at position 500",
        "the largest token is 40000",
        "--set model.vocab=40001",
    ]);
}
