//! Files that a command writes: what is at their place already is respected.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::command::{SMALL, phalanx, shell, small_run, under};

const SCHEDULE: &[&str] = &["schedule", "1f1b", "--stages", "2", "--microbatches", "2"];

fn svg(dir: &Path, file: &str) -> crate::command::Done {
    under(dir, "", &[SCHEDULE, &["--svg", file]])
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_link_is_followed_and_stays_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("elsewhere")).unwrap();
    fs::write(dir.join("elsewhere/old.svg"), "old").unwrap();
    symlink("elsewhere/old.svg", dir.join("a.svg")).unwrap();
    symlink("a.svg", dir.join("b.svg")).unwrap();
    symlink("elsewhere/new.svg", dir.join("new.svg")).unwrap();
    for (link, goal) in [("b.svg", "elsewhere/old.svg"), ("new.svg", "elsewhere/new.svg")] {
        svg(dir, link).ok();
        assert!(dir.join(link).is_symlink(), "{link}");
        assert!(text(dir.join(goal)).starts_with("<svg"), "{goal}");
    }
    assert!(dir.join("a.svg").is_symlink());
    assert_eq!(fs::read_dir(dir.join("elsewhere")).unwrap().count(), 2, "no temporary is left");
}

#[test]
fn a_link_that_leads_nowhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    symlink("loop.svg", dir.join("loop.svg")).unwrap();
    symlink("gone/x.svg", dir.join("far.svg")).unwrap();
    fs::write(dir.join("file"), "").unwrap();
    svg(dir, "loop.svg").refused(&["loop.svg", "usual fix"]);
    svg(dir, "loop.svg/x.svg").refused(&["loop.svg", "usual fix"]);
    svg(dir, "far.svg").refused(&["gone does not exist", "usual fix"]);
    svg(dir, "file/x.svg").refused(&["file", "usual fix"]);
    assert!(dir.join("loop.svg").is_symlink() && dir.join("far.svg").is_symlink());
}

#[test]
fn permissions_are_kept_and_what_is_read_only_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (name, mode) in [("private.svg", 0o600), ("shared.svg", 0o664), ("fixed.svg", 0o400)] {
        fs::write(dir.join(name), "old").unwrap();
        assert!(shell(dir, &format!("chmod {mode:o} {name}")));
    }
    svg(dir, "private.svg").ok();
    svg(dir, "shared.svg").ok();
    svg(dir, "fixed.svg").refused(&["fixed.svg", "read-only"]);
    let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().mode() & 0o777;
    assert_eq!(["private.svg", "shared.svg", "fixed.svg"].map(mode), [0o600, 0o664, 0o400]);
    assert_eq!(text(dir.join("fixed.svg")), "old");
}

#[test]
fn a_pipe_gets_the_content_and_stays_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(shell(dir, "mkfifo pipe"));
    symlink("pipe", dir.join("link")).unwrap();
    for name in ["pipe", "link"] {
        let reader = Command::new("timeout")
            .args(["60", "cat", "pipe"])
            .current_dir(dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        svg(dir, name).ok();
        let read = reader.wait_with_output().unwrap().stdout;
        assert!(read.starts_with(b"<svg") && read.ends_with(b"</svg>\n"), "{name}");
        assert!(fs::metadata(dir.join("pipe")).unwrap().file_type().is_fifo());
    }
    // A pipe that nobody reads does not keep the command waiting.
    let done = svg(dir, "pipe");
    assert_eq!((done.code, &*done.out), (1, ""), "{}", done.err);
    assert!(done.err.contains("usual fix: start the program that reads this pipe"), "{}", done.err);
}

/// Only an administrator may make devices, and not in every container.
#[test]
fn a_device_stays_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    if !shell(dir, "mknod null c 1 3 2>/dev/null && echo x 2>/dev/null > null") {
        return;
    }
    symlink("null", dir.join("link")).unwrap();
    for name in ["null", "link"] {
        svg(dir, name).ok();
        under(dir, "", &[SCHEDULE, &["--csv", name]]).ok();
        let trace = ["--set", "train.steps=1", "--trace", name];
        under(dir, "", &[&["train"], SMALL, &trace]).refused(&[name, "regular file"]);
    }
    assert!(fs::metadata(dir.join("null")).unwrap().file_type().is_char_device());
    assert_eq!(fs::read_dir(dir).unwrap().count(), 2);
}

#[test]
fn standard_output_gets_the_table_and_the_picture() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let csv = [SCHEDULE, &["--csv", "/dev/stdout"]];
    let whole = |printed: &str| printed.contains("device") && printed.contains("makespan");
    let printed = under(dir, "", &csv).ok().out;
    assert!(whole(&printed), "{printed}");
    under(dir, "exec > printed", &csv).ok();
    assert_eq!(text(dir.join("printed")), printed);
    fs::write(dir.join("printed"), "before\n").unwrap();
    under(dir, "exec >> printed", &csv).ok();
    assert_eq!(text(dir.join("printed")), format!("before\n{printed}"));
}

#[test]
fn two_links_to_one_file_are_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    symlink("one", dir.join("a")).unwrap();
    symlink("one", dir.join("b")).unwrap();
    phalanx(dir, &[SCHEDULE, &["--svg", "a", "--csv", "b"]]).refused(&["are the same file"]);
}

#[test]
fn an_export_that_cannot_be_written_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    fs::write(dir.join("file"), "").unwrap();
    fs::create_dir_all(dir.join("half/config.json")).unwrap();
    symlink("loop", dir.join("loop")).unwrap();
    for out in ["file", "file/x", "loop", "loop/x", "half"] {
        let done = phalanx(dir, &[&["export", "--run", "runs/a", "--out", out]]);
        done.refused(&[out, "usual fix"]);
    }
    assert_eq!(fs::read_dir(dir.join("half")).unwrap().count(), 1);
}

/// The pretrained weights are often the only copy.
#[test]
fn an_export_never_replaces_what_the_run_started_from() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    let export = |run: &str, out: &str| phalanx(dir, &[&["export", "--run", run, "--out", out]]);
    export("runs/a", "hf").ok();
    export("runs/a", "hf").ok();
    let before = fs::read(dir.join("hf/model.safetensors")).unwrap();
    let more = ["train.steps=1", "train.batch_size=8", "model.from=hf:hf", "run.name=b"];
    let more: Vec<&str> = more.iter().flat_map(|set| ["--set", set]).collect();
    phalanx(dir, &[&["train"], &more]).ok();
    symlink("hf", dir.join("link")).unwrap();
    for out in ["hf", "./hf/", "link"] {
        export("runs/b", out).refused(&["the folder of model.from", "another folder with --out"]);
    }
    assert!(fs::read(dir.join("hf/model.safetensors")).unwrap() == before);
    fs::create_dir(dir.join("sharded")).unwrap();
    fs::write(dir.join("sharded/model.safetensors.index.json"), "{}").unwrap();
    export("runs/b", "sharded").refused(&["several files", "another folder with --out"]);
}
