//! Checkpoints that are damaged, and disks that have no room for them.

use std::fs;

use crate::command::{phalanx, under};
use crate::resuming::{go_on, run};

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, "a", 6, &["run.checkpoint_every=2"]);
    let newest = dir.join("runs/a/checkpoints/step-00000006/rank-0000.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&newest, &bytes).unwrap();
    phalanx(dir, &[&["checkpoint", "check", "runs/a"]]).refused(&["have changed", "rank-0000"]);
    go_on(dir, "runs/a", &["train.steps=7"]).refused(&["have changed", "take another checkpoint"]);
    fs::write(&newest, &bytes[..last]).unwrap();
    let rest = go_on(dir, "runs/a", &["train.steps=7", "run.name=b"]).ok();
    assert_eq!(rest.json()[0]["at_step"], 4);
    // What is passed over is named wherever a run is asked about; a check of the run does not hide it.
    let used = ["rank-0000.safetensors has", "step-00000004 is used instead"];
    let shown = phalanx(dir, &[&["checkpoint", "show", "runs/a"]]).ok();
    for words in used {
        assert!(rest.err.contains(words), "{}", rest.err);
        assert!(shown.err.contains(words), "{}", shown.err);
    }
    phalanx(dir, &[&["checkpoint", "check", "runs/a"]])
        .refused(&["step-00000006 is damaged", "such as runs/a/checkpoints/step-00000004"]);
    let said = phalanx(dir, &[&["doctor", "runs/a"]]).ok().out;
    assert!(said.contains("step-00000006 is damaged: rank-0000"), "{said}");
    for step in ["step-00000002", "step-00000004"] {
        fs::remove_file(dir.join("runs/a/checkpoints").join(step).join("manifest.json")).unwrap();
    }
    go_on(dir, "runs/a", &["train.steps=7"]).refused(&[
        "no whole checkpoint",
        "step-00000006 is damaged",
        "step-00000002",
    ]);
}

#[test]
fn a_disk_without_room_fails_the_run_and_keeps_the_checkpoint_before() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, "a", 2, &["run.checkpoint_every=2"]);
    let more = ["train", "--resume", "runs/a", "--set", "train.steps=6"];
    // Files may have 30 KiB: metrics fit, checkpoints do not.
    let done = under(dir, "ulimit -f 30", &[&more]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("step-00000004.tmp/rank-0000.safetensors"), "{}", done.err);
    assert_eq!(done.err.matches("error:").count(), 1, "{}", done.err);
    // What did not fit makes room again.
    let mut left =
        fs::read_dir(dir.join("runs/a/checkpoints")).unwrap().map(|e| e.unwrap().file_name());
    assert!(left.all(|name| !name.to_string_lossy().ends_with(".tmp")));
    let rest = go_on(dir, "runs/a", &["train.steps=4"]).ok();
    assert_eq!(rest.json()[0]["at_step"], 2);
}
