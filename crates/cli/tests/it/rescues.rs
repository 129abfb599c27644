//! A run that loses its terminal or its folder keeps its weights.

use std::fs;
use std::io::{BufReader, Read};
use std::path::Path;
use std::process::{Child, Command};

use crate::command::{SMALL, first_step, phalanx, shell};

/// A long run, after its first step.
fn long_run(dir: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut run = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    run.args(["train", "--json"])
        .args(SMALL)
        .args(["--set", "train.steps=1000000", "--set", "run.name=a"])
        .current_dir(dir)
        .env("TMPDIR", dir.join("tmp"));
    first_step(&mut run)
}

/// Sends signals to a run, and gives its code and what it said.
fn end(run: (Child, BufReader<std::process::ChildStdout>), signals: &[&str]) -> (i32, String) {
    let (mut child, mut out) = run;
    for signal in signals {
        let command = format!("kill -{signal} {}", child.id());
        assert!(shell(Path::new("."), &command), "{command}");
    }
    let (mut rest, mut err) = (Vec::new(), String::new());
    out.read_to_end(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (child.wait().unwrap().code().unwrap_or(-1), err)
}

/// Whether this process, and what it starts, ignores SIGHUP, which is signal 1.
fn hangups_are_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 != 0
}

/// A shell that is closed sends SIGHUP more than once, and batch systems warn more than once.
#[test]
fn a_lost_terminal_and_warnings_of_batch_systems_keep_the_weights() {
    for signals in [&["HUP", "HUP", "HUP"][..], &["USR1"], &["XCPU", "XCPU"]] {
        // A run that was started to outlive its terminal (nohup) goes on, as it should.
        if signals[0] == "HUP" && hangups_are_ignored() {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let (code, err) = end(long_run(dir), signals);
        assert_eq!(code, 1, "{signals:?}: {err}");
        assert!(err.contains("stopped on request after step"), "{err}");
        phalanx(dir, &[&["eval", "--model", "run:runs/a"]]).ok();
    }
}

#[test]
fn a_run_whose_folder_is_moved_or_removed_keeps_its_weights() {
    let cases = [
        ("mv runs/a b", "b"),
        ("rm -r runs/a", "runs/a"),
        ("rm -r runs && echo > runs && mkdir tmp", "tmp/a"),
        ("mkdir tmp runs/a/model.safetensors", "tmp/a"),
    ];
    for (command, place) in cases {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let run = long_run(dir);
        assert!(shell(dir, command), "{command}");
        let (code, err) = end(run, &["TERM"]);
        assert_eq!(code, 1, "{err}");
        let told = format!("{place}/model.safetensors");
        assert!(err.contains("are safe in ") && err.contains(&told), "{command}: {err}");
        phalanx(dir, &[&["eval", "--model", &format!("run:{place}")]]).ok();
    }
}

#[test]
fn nothing_is_left_where_no_refuge_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let run = long_run(dir);
    fs::write(dir.join("tmp"), "no folder").unwrap();
    assert!(shell(dir, "rm -r runs && echo > runs"));
    let (code, err) = end(run, &["TERM"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("are lost"), "{err}");
    assert_eq!(fs::read_dir(dir).unwrap().count(), 2);
}
