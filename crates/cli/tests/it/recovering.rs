//! Ranks that are lost in other ways than by a kill inside a step: what is said, and how the run goes on.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{Done, SMALL, phalanx};

const DP: &[&str] = &["--set", "parallel.dp=2", "--set", "train.steps=8"];

fn saving(every: &str) -> Vec<String> {
    vec!["--set".to_owned(), format!("run.checkpoint_every={every}")]
}

/// A small run of two processes with faults, as `name`.
fn launch(dir: &Path, name: &str, more: &[String], faults: &str) -> Done {
    let output = command(dir, name, more, faults).output().unwrap();
    Done {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn command(dir: &Path, name: &str, more: &[String], faults: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.current_dir(dir).args(["launch", "-n", "2", "--", "train", "--json"]);
    command.args(SMALL).args(DP).args(["--set", &format!("run.name={name}")]).args(more);
    command.env("PHALANX_FAULT", faults).env("TMPDIR", dir);
    command
}

fn weights(dir: &Path, name: &str) -> Vec<u8> {
    fs::read(dir.join("runs").join(name).join("model.safetensors")).unwrap()
}

/// The restarts that a run has printed.
fn restarts(done: &Done) -> Vec<Value> {
    done.json().into_iter().filter(|line| line["event"] == "restart").collect()
}

#[test]
fn a_lost_rank_is_named_and_the_run_goes_on_from_the_latest_state_that_can_be_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    launch(dir, "whole", &[], "").ok();
    // What is lost in which way, and from where the run goes on: steps 3 and 6 are saved, and
    // committed two steps later.
    for (number, (fault, more, from, at_step, words)) in [
        ("kill rank=1 step=6 phase=B", saving("3"), "memory", 5, "was ended by SIGKILL in step 6"),
        ("segv rank=1 step=6 phase=B", saving("3"), "checkpoint", 3, "was ended by SIGSEGV"),
        ("panic rank=0 step=6 phase=F", saving("3"), "checkpoint", 3, "was ended by a panic"),
        (
            "kill rank=0 step=4 phase=update",
            vec![],
            "beginning",
            0,
            "was ended by SIGKILL in step 4",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("a{number}");
        let done = launch(dir, &name, &more, fault).ok();
        let found = restarts(&done);
        assert_eq!(found.len(), 1, "{fault}: {}", done.err);
        assert_eq!((&found[0]["from"], &found[0]["at_step"]), (&from.into(), &at_step.into()));
        for word in [words, "its last call was", "(restart 1 of 10)"] {
            assert!(done.err.contains(word), "{fault}: `{word}` is not in {}", done.err);
        }
        assert!(weights(dir, &name) == weights(dir, "whole"), "{fault}");
        // Each step is in the metrics once, and the summary counts all.
        let text = fs::read_to_string(dir.join("runs").join(&name).join("metrics.jsonl")).unwrap();
        assert_eq!(text.matches("{\"step\":").count(), 8, "{fault}");
        let summary = done.json().pop().unwrap();
        assert_eq!(summary["summary"]["steps"], 8, "{fault}");
        let ledger = &summary["summary"]["ledger"];
        assert!(ledger["recovery"].as_f64().unwrap() > 0.0 && ledger["restarts"] == 1, "{ledger}");
        assert_eq!(ledger["redone"].as_f64().unwrap() > 0.0, from != "memory", "{ledger}");
    }
}

#[test]
fn restarts_are_bounded_and_the_end_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let every = |count: usize| {
        let one = |epoch| format!("kill rank=1 step=2 phase=F epoch={epoch}");
        (0..count).map(one).collect::<Vec<_>>().join(";")
    };
    let never = ["--set", "run.restarts=0"].map(str::to_owned);
    let done = launch(dir, "a", &never, &every(1));
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(
        done.err.contains("error: the process of rank 1 of 2 was ended by SIGKILL"),
        "{}",
        done.err
    );
    assert!(done.err.contains("the run does not go on: run.restarts = 0"), "{}", done.err);
    assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
    let text = fs::read_to_string(dir.join("runs/a/ledger.json")).unwrap();
    let ledger: Value = serde_json::from_str(&text).unwrap();
    assert!(ledger["start"].as_f64().unwrap() > 0.0 && ledger["restarts"] == 0, "{ledger}");
    let doctor = phalanx(dir, &[&["doctor", "runs/a"]]).ok();
    for word in
        ["the job is not alive", "rank 1 was ended by SIGKILL in step 2", "its last call was"]
    {
        assert!(doctor.out.contains(word), "`{word}` is not in {}", doctor.out);
    }
    // A rank that is lost in the same step again and again is not bad luck.
    let done = launch(dir, "b", &[], &every(9));
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("(restart 3 of 10)"), "{}", done.err);
    assert!(done.err.contains("3 restarts in a row did not get past step 2"), "{}", done.err);
}

#[test]
fn a_rank_that_cannot_be_started_again_is_done_without() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let f64 = ["--set", "precision.compute=f64"].map(str::to_owned);
    let whole = launch(dir, "whole", &f64, "").ok();
    let fewer = [saving("2"), ["--set", "run.min_ranks=1"].map(str::to_owned).to_vec()].concat();
    let fault = "kill rank=1 step=6 phase=F; kill rank=1 step=6 phase=F epoch=1";
    let done = launch(dir, "a", &[&fewer, &f64[..]].concat(), fault).ok();
    assert!(done.err.contains("with 1 rank instead of 2 (restart 2 of 10)"), "{}", done.err);
    let losses = |name: &str| -> Vec<f64> {
        let text = fs::read_to_string(dir.join("runs").join(name).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter_map(|line| line["loss"].as_f64()).collect()
    };
    let (one, other) = (losses("whole"), losses("a"));
    assert_eq!((one.len(), other.len()), (8, 8), "{}", whole.err);
    for (a, b) in one.iter().zip(&other) {
        assert!((a - b).abs() <= 1e-10 * a.abs(), "{a} {b}");
    }
    let config = fs::read_to_string(dir.join("runs/a/config.toml")).unwrap();
    assert!(config.contains("dp = 1\n") && config.contains("microbatches = 2\n"), "{config}");
}

#[test]
fn a_process_that_is_alone_can_be_watched_too() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let run = |name: &str, fault: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir).args(["launch", "-n", "1", "--", "train", "--json"]).args(SMALL);
        command.args(["--set", "train.steps=8", "--set", "run.checkpoint_every=2"]);
        command.args(["--set", &format!("run.name={name}")]).env("PHALANX_FAULT", fault);
        let output = command.env("TMPDIR", dir).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{err}");
        err
    };
    run("whole", "");
    let err = run("a", "kill rank=0 step=6 phase=B; kill rank=0 step=7 phase=F epoch=1");
    assert!(err.contains("going on from the checkpoint after step 2 (restart 1 of 10)"), "{err}");
    assert!(err.contains("(restart 2 of 10)"), "{err}");
    assert!(weights(dir, "a") == weights(dir, "whole"));
}

#[test]
fn an_error_that_would_come_again_is_not_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let bad = ["--set", "optim.lr=1e30", "--set", "optim.clip=none"].map(str::to_owned);
    let done = launch(dir.path(), "a", &bad, "");
    assert_eq!((done.code, restarts(&done).len()), (1, 0), "{}", done.err);
    assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
}

#[test]
fn a_stopped_rank_is_named_by_launcher_and_doctor_and_then_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    launch(dir, "whole", &[], "").ok();
    let patience = ["--set", "run.timeout_s=4"].map(str::to_owned);
    let mut run = command(dir, "a", &patience, "stop rank=1 step=3 phase=B");
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    let told = loop {
        let doctor = phalanx(dir, &[&["doctor", "runs/a", "--json"]]);
        if doctor.code == 0 {
            let found = doctor.json().remove(0);
            if found["alive"] == true && found["sentence"].as_str().unwrap().contains("stopped") {
                break found;
            }
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{}", doctor.err);
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(told["job"]["blame"], 1, "{told}");
    let sentence = told["sentence"].as_str().unwrap();
    assert!(sentence.contains("is stopped in step 3, in `"), "{sentence}");
    let mut err = String::new();
    run.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(run.wait().unwrap().success(), "{err}");
    for word in ["is stopped in step 3", "kill -CONT", "going on from memory after step 2"] {
        assert!(err.contains(word), "`{word}` is not in {err}");
    }
    assert!(weights(dir, "a") == weights(dir, "whole"));
    // A rank that hangs is not stopped, but does nothing while the other waits.
    let patience = ["--set", "run.timeout_s=2"].map(str::to_owned);
    let done = launch(dir, "b", &patience, "hang rank=0 step=3 phase=F").ok();
    for word in ["has been busy for", "in step 3, in `embed F mb 0`", "rank 1 waits for it"] {
        assert!(done.err.contains(word), "`{word}` is not in {}", done.err);
    }
    assert!(done.err.contains("going on from memory after step 2 (restart 1"), "{}", done.err);
    assert!(weights(dir, "b") == weights(dir, "whole"));
    let doctor = phalanx(dir, &[&["doctor", "runs/a"]]).ok();
    assert!(doctor.out.contains("has ended as it should"), "{}", doctor.out);
    phalanx(dir, &[&["doctor", "runs"]]).refused(&["is not the folder of a run"]);
}
