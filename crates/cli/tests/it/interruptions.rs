//! A run that is stopped, or whose disk takes no more, keeps what it has and says what that is.

use std::io::Read;
use std::path::Path;
use std::process::Command;

use crate::command::{SMALL, first_step, phalanx, small_run};

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_run_that_is_asked_to_stop_keeps_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--set", "train.steps=1000000", "--set", "run.name=a", "--json"];
    let mut run = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    run.current_dir(dir.path()).arg("train").args(SMALL).args(settings);
    let (mut child, mut out) = first_step(&mut run);
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{err}");
    let last: serde_json::Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
    let steps = last["summary"]["steps"].as_u64().unwrap();
    assert_eq!(last["summary"]["tokens"], steps * 8 * 16);
    assert!(err.contains(&format!("stopped on request after step {steps} of 1000000")), "{err}");
    let run = dir.path().join("runs/a");
    assert_eq!(
        names(&run),
        ["config.toml", "ledger.json", "loss.svg", "metrics.jsonl", "model.safetensors"]
    );
    phalanx(dir.path(), &[&["eval", "--model", "run:runs/a"]]).ok();
}

/// Runs in `dir` under a shell that lets no file grow beyond `blocks` of 512 bytes, as a full disk
/// would not.
fn limited(dir: &Path, blocks: usize, args: &[&[&str]]) -> (Option<i32>, String) {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    let done = Command::new("sh")
        .current_dir(dir)
        .args(["-c", &script, env!("CARGO_BIN_EXE_phalanx")])
        .args(args.concat())
        .output()
        .unwrap();
    (done.status.code(), String::from_utf8(done.stderr).unwrap())
}

#[test]
fn weights_that_cannot_be_written_are_told_with_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--set", "train.steps=3", "--set", "run.name=a"];
    let (code, err) = limited(dir.path(), 14, &[&["train"], SMALL, &settings]);
    assert_eq!(code, Some(1), "{err}");
    for words in ["error: runs/a/model.safetensors", "the weights after step 3 are lost"] {
        assert!(err.contains(words), "`{words}` is not in: {err}");
    }
    assert_eq!(names(&dir.path().join("runs/a")), ["config.toml", "metrics.jsonl"]);
}

#[test]
fn metrics_that_cannot_be_written_do_not_take_the_weights_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--set", "train.steps=100000", "--set", "run.name=a"];
    let (code, err) = limited(dir.path(), 64, &[&["train"], SMALL, &settings]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("error: cannot write runs/a/metrics.jsonl"), "{err}");
    assert!(err.contains("are safe in runs/a/model.safetensors"), "{err}");
    phalanx(dir.path(), &[&["eval", "--model", "run:runs/a"]]).ok();
}

#[test]
fn a_folder_that_cannot_be_filled_is_not_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (code, err) = limited(dir.path(), 1, &[&["train"], SMALL]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("config.toml"), "{err}");
    assert_eq!(names(&dir.path().join("runs")), [""; 0]);
}

#[test]
fn an_export_that_cannot_be_written_leaves_nothing_half_done() {
    let dir = tempfile::tempdir().unwrap();
    small_run(dir.path());
    let export = ["export", "--run", "runs/a", "--out", "hf"];
    let (code, err) = limited(dir.path(), 4, &[&export]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("error: hf/model.safetensors"), "{err}");
    assert_eq!(names(&dir.path().join("hf")), [""; 0]);
}
