//! Files that a command reads: pipes and devices neither hang it nor are they silently dropped.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::command::{SMALL, phalanx, shell, small_run, under};

const TOML: &str = "[model]\nlayers = 3\nwidth = 16\nheads = 2\nkv_heads = 1\nffn = 24\nvocab = 32\n\
    [train]\nseq_len = 16\nbatch_size = 8\n[run]\nthreads = 1\n";

#[test]
fn a_configuration_from_a_pipe_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("c.toml"), TOML).unwrap();
    let explain = |before: &str, file: &str| under(dir, before, &[&["explain", file, "--ranks"]]);
    let expected = explain("", "c.toml").ok().out;
    for (before, file) in [
        ("exec < c.toml", "/dev/stdin"),
        ("exec < c.toml", "-"),
        ("exec < <(cat c.toml)", "/dev/stdin"),
        ("exec 9< <(cat c.toml)", "/dev/fd/9"),
        ("exec 9< c.toml", "/proc/self/fd/9"),
    ] {
        assert_eq!(explain(before, file).ok().out, expected, "{before}; {file}");
    }
    let train = ["train", "/dev/stdin", "--set", "train.steps=1", "--set", "run.name=a"];
    let done = under(dir, "exec < <(cat c.toml)", &[&train]).ok();
    assert!(done.out.contains("llama of 3 layers, width 16"), "{}", done.out);
    assert!(fs::read_to_string(dir.join("runs/a/config.toml")).unwrap().contains("layers = 3"));
}

#[test]
fn pipes_and_devices_are_refused_where_a_file_is_needed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    assert!(shell(dir, "mkfifo pipe"));
    symlink("/dev/zero", dir.join("endless")).unwrap();
    let schedule = ["schedule", "--json"];
    for file in ["pipe", "endless"] {
        let words = [file, "not a regular file", "usual fix"];
        under(dir, "", &[&["train", file]]).refused(&words);
        let table = format!("csv:{file}");
        under(dir, "", &[&schedule, &[&table]]).refused(&words);
        let set = format!("parallel.schedule={table}");
        let pipeline = ["train", "--set", "parallel.pp=2", "--set", &set];
        under(dir, "", &[&pipeline, SMALL, &["--set", "model.layers=2"]]).refused(&words);
    }
}

/// What a folder of a model or run holds is replaced, one file at a time, by something that is no
/// file.
#[test]
fn folders_with_pipes_and_dead_links_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf"]]).ok();
    let eval = |model: &str| under(dir, "", &[&["eval", "--model", model, "--ids", "1,2"]]);
    let cases = [
        ("hf:hf", "hf/config.json"),
        ("hf:hf", "hf/model.safetensors"),
        ("run:runs/a", "runs/a/config.toml"),
        ("run:runs/a", "runs/a/model.safetensors"),
    ];
    for (model, file) in cases {
        let path = dir.join(file);
        let bytes = fs::read(&path).unwrap();
        let replace = |command: &str| {
            fs::remove_file(&path).unwrap();
            assert!(shell(dir, command), "{command}");
        };
        replace(&format!("mkfifo {file}"));
        eval(model).refused(&["pipe", file, "usual fix"]);
        replace(&format!("ln -s /no/such/blob {file}"));
        if file != "runs/a/config.toml" {
            eval(model).refused(&["no", "usual fix"]);
        }
        replace(&format!("mkdir {file}"));
        eval(model).refused(&["folder", "usual fix"]);
        fs::remove_dir(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        eval(model).ok();
    }
}

#[test]
fn files_without_end_are_not_read_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let sparse = |name: &str| {
        let file = fs::File::create(dir.join(name)).unwrap();
        file.set_len(1 << 36).unwrap();
    };
    for file in ["huge.toml", "huge.csv"] {
        sparse(file);
    }
    fs::create_dir(dir.join("hf")).unwrap();
    sparse("hf/config.json");
    let limit = "ulimit -v 2000000";
    under(dir, limit, &[&["train", "huge.toml"]]).refused(&["huge.toml", "more than"]);
    under(dir, limit, &[&["schedule", "csv:huge.csv"]]).refused(&["huge.csv", "more than"]);
    let eval = ["eval", "--model", "hf:hf", "--ids", "1,2"];
    under(dir, limit, &[&eval]).refused(&["config.json", "more than"]);
    let zeros = "exec < /dev/zero";
    under(dir, zeros, &[&["train", "/dev/stdin"]]).refused(&["/dev/stdin", "more than"]);
}

#[test]
fn a_file_that_is_no_text_or_no_file_is_told_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir_all(dir.join("hf")).unwrap();
    let eval = || phalanx(dir, &[&["eval", "--model", "hf:hf", "--ids", "1,2"]]);
    fs::write(dir.join("hf/config.json"), [0xff, 0xfe, 0x00]).unwrap();
    eval().refused(&["hf/config.json", "usual fix"]);
    fs::remove_file(dir.join("hf/config.json")).unwrap();
    symlink("config.json", dir.join("hf/config.json")).unwrap();
    eval().refused(&["hf", "usual fix"]);
    symlink("round", dir.join("round")).unwrap();
    for file in ["round", "hf"] {
        phalanx(dir, &[&["train", file]]).refused(&[file, "usual fix"]);
    }
    let gone = Path::new("/no/such/folder/c.toml");
    symlink(gone, dir.join("dead.toml")).unwrap();
    phalanx(dir, &[&["train", "dead.toml"]]).refused(&[
        "dead.toml",
        "/no/such/folder",
        "usual fix",
    ]);
}

/// The spelling of a very long name is not guessed.
#[test]
fn a_name_of_a_megabyte_is_answered_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let name = "x".repeat(1_000_000);
    fs::write(dir.join("c.toml"), format!("[model]\n{name} = 1\n{name}y = 2\n")).unwrap();
    under(dir, "", &[&["train", "c.toml"]]).refused(&["c.toml:2", "c.toml:3"]);
    fs::write(dir.join("c.toml"), format!("preset = \"{name}\"\n[{name}]\na = 1\n")).unwrap();
    under(dir, "", &[&["train", "c.toml"]]).refused(&["there is no preset"]);
}

/// With and without data, a setting cannot change the shape of stored weights.
#[test]
fn settings_that_contradict_a_folder_are_refused_for_ids_too() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf"]]).ok();
    let eval = ["eval", "--model", "hf:hf", "--ids", "1,2"];
    for set in ["model.layers=7", "model.width=64", "model.tied=true", "model.rope_theta=7.0"] {
        phalanx(dir, &[&eval, &["--set", set]]).refused(&["contradicts the model's", "leave"]);
    }
    phalanx(dir, &[&eval, &["--set", "model.layers=1", "--set", "precision.compute=f64"]]).ok();
    phalanx(dir, &[&eval, &["--preset", "tiny"]]).ok();
}
