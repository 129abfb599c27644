//! Bad input: exit code 2, nothing on standard output, a reason and a remedy.

use std::fs;

use crate::command::{SMALL, phalanx, small_run};

#[test]
fn usage_errors_are_refusals_and_help_is_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    phalanx(dir, &[&["fly"]]).refused(&["fly", "--help"]);
    phalanx(dir, &[&["train", "--speed", "9"]]).refused(&["--speed"]);
    phalanx(dir, &[&[]]).refused(&["train"]);
    phalanx(dir, &[&["bench"]]).refused(&["step"]);
    phalanx(dir, &[&["eval", "--model", "models/a"]]).refused(&["hf:DIR", "run:DIR"]);
    for help in [["--help"].as_slice(), &["train", "--help"], &["bench", "step", "--help"]] {
        assert!(phalanx(dir, &[help]).ok().out.contains("Usage"));
    }
    let listing = phalanx(dir, &[&["help", "config"]]).ok().out;
    assert!(listing.contains("[optim]") && listing.contains("warmup_steps"));
    assert!(phalanx(dir, &[&["config"]]).ok().out.contains("\n[model]\n"));
}

#[test]
fn configurations_that_cannot_work_are_told_with_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("bad.toml"), "[model]\nheads = 5\n\n[train]\nstpes = 9\n").unwrap();
    phalanx(dir, &[&["train", "bad.toml", "--json"]]).refused(&[
        "bad.toml:5",
        "did you mean train.steps?",
        "bad.toml:2",
        "model.heads = 4",
    ]);
    phalanx(dir, &[&["train", "gone.toml"]]).refused(&["gone.toml", "usual fix"]);
    phalanx(dir, &[&["train", "--preset", "tinny"]]).refused(&["did you mean `tiny`?"]);
    let set = |assignment| phalanx(dir, &[&["train", "--set", assignment]]);
    set("parallel.pp=5").refused(&["4 layers can't be cut into 5 stages", "4 stages"]);
    set("model.kind=mlp").refused(&["mlp_regression"]);
    set("model.dropout=0.1").refused(&["llama has no dropout"]);
    let large =
        phalanx(dir, &[&["train", "--preset", "llama-0.95b", "--set", "train.batch_size=4096"]]);
    large.refused(&["this machine has", "train.microbatches"]);
    set("run.memory_limit=1000")
        .refused(&["run.memory_limit allows 1000", "most memory of a rank goes to"]);
    assert!(!dir.join("runs").exists(), "nothing was started");
}

/// Each change that is named has been planned, and takes what is said.
#[test]
fn a_plan_over_its_limit_names_the_category_and_changes_that_fit() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let tiny = ["train", "--preset", "tiny", "--set", "parallel.dp=2", "--set", "train.steps=1"];
    let train = |more: &[&str]| phalanx(dir, &[&tiny, more]);
    let told = train(&["--set", "run.memory_limit=24MiB"]);
    told.refused(&[
        "the plan of a rank takes",
        "most memory of a rank goes to residuals: residuals",
    ]);
    told.refused(&["nearest that work: ", "train.microbatches = 2 (", "(--set)"]);
    train(&["--set", "run.memory_limit=24MiB", "--set", "train.microbatches=2"]).ok();
    let told = train(&["--set", "run.memory_limit=100KiB"]);
    told.refused(&["no single change is enough", "all of these together take"]);
}

#[test]
fn layouts_that_cannot_work_are_refused_with_what_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let set = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        phalanx(dir, &[&["train", "--preset", "tiny"], &sets])
    };
    set(&["parallel.tp=16"]).refused(&[
        "parallel.tp = 16 does not work with 8 heads and 4 key heads (--set, ",
        "16 ranks can't share 8 heads",
        "nearest that work: parallel.tp = 8",
    ]);
    set(&["parallel.tp=6"]).refused(&["6 ranks can't share 4 key heads", "parallel.tp = 4 or 8"]);
    set(&["parallel.tp=4", "parallel.cp=4"]).refused(&[
        "parallel.cp = 4 does not work with 2 heads and 1 key head on each of parallel.tp = 4 \
        ranks",
        "parallel.cp = 2; or parallel.cp_kind = \"allgather\"",
    ]);
    set(&["parallel.dp=64"]).refused(&[
        "parallel.dp = 64 leaves some ranks without work: train.batch_size = 32",
        "train.batch_size = 64, or parallel.dp = 32",
    ]);
    set(&["parallel.order=tp-tp"]).refused(&["each at most once"]);
    set(&["parallel.order=tp-dp", "parallel.cp=2"])
        .refused(&["leaves out cp = 2", "\"tp-dp-cp\", or parallel.cp = 1"]);
    set(&["parallel.dp=4", "parallel.dp_shard=3"]).refused(&["parallel.dp_shard = 2 or 4"]);
    assert!(!dir.join("runs").exists(), "nothing was started");
}

#[test]
fn data_that_cannot_be_read_is_told_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let data = |kind: &str, path: &str| {
        let (kind, path) = (format!("data.kind={kind}"), format!("data.path={path}"));
        phalanx(dir, &[&["train", "--json"], &["--set", &kind, "--set", &path]])
    };
    data("text", "gone.txt").refused(&["gone.txt"]);
    fs::write(dir.join("empty.txt"), "").unwrap();
    data("text", "empty.txt").refused(&["empty.txt", "empty"]);
    fs::write(dir.join("short.txt"), "abc").unwrap();
    data("text", "short.txt").refused(&["short.txt", "too short"]);
    fs::write(dir.join("odd.u16"), [1, 0, 2]).unwrap();
    data("tokens", "odd.u16").refused(&["odd.u16", "truncated"]);
    let tokens: Vec<u8> = (0..4096u16).flat_map(u16::to_le_bytes).collect();
    fs::write(dir.join("large.u16"), tokens).unwrap();
    data("tokens", "large.u16").refused(&["token 256", "vocabulary of 256"]);
    phalanx(dir, &[&["train", "--set", "data.kind=text"]]).refused(&["data.path"]);
}

/// What is wrong, why and what would work stand on lines of their own, with the place of the key.
#[test]
fn problems_of_data_and_weights_have_the_form_of_a_refusal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("short.txt"), "abc").unwrap();
    fs::write(dir.join("c.toml"), "[data]\nkind = \"text\"\npath = \"short.txt\"\n").unwrap();
    assert_eq!(
        phalanx(dir, &[&["train", "c.toml"]]).err,
        "error: text file short.txt (3 bytes) is too short: it has 3 tokens (c.toml:3)\n  \
         one training and one evaluation sample of 128 tokens and their targets need 257 tokens\n  \
         usual fix: use more data\n"
    );
    fs::create_dir(dir.join("hf")).unwrap();
    fs::write(dir.join("hf/config.json"), "{\"model_type\": \"bert\"}").unwrap();
    let done = phalanx(dir, &[&["eval", "--model", "hf:hf", "--ids", "1,2"]]);
    assert_eq!((done.code, done.err.lines().count()), (2, 3), "{}", done.err);
    done.refused(&["error: hf/config.json: `model_type` = \"bert\"", "\n  supported: "]);
}

#[test]
fn folders_that_hold_no_model_are_told_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let eval = |model: &str| phalanx(dir, &[&["eval", "--model", model, "--ids", "1,2", "--json"]]);
    eval("hf:gone").refused(&["gone"]);
    eval("run:gone").refused(&["gone"]);
    fs::create_dir(dir.join("empty")).unwrap();
    eval("hf:empty").refused(&["config.json"]);
    eval("run:empty").refused(&["model.safetensors"]);
    phalanx(dir, &[&["export", "--run", "gone", "--out", "x"]]).refused(&["gone"]);
    phalanx(dir, &[&["train", "--set", "model.from=hf:gone"]])
        .refused(&["gone does not exist (--set)", "config.json"]);

    small_run(dir);
    let weights = dir.join("runs/a/model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    eval("run:runs/a").refused(&["model.safetensors", "damaged"]);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "x"]]).refused(&["damaged"]);
    assert!(!dir.join("x").exists());
    fs::write(&weights, bytes).unwrap();
    let ids = |ids: &str| phalanx(dir, &[&["eval", "--model", "run:runs/a", "--ids", ids]]);
    ids("1,99").refused(&["token 99", "0 to 31"]);
    ids("1,-2").refused(&["token -2"]);
    ids("7").refused(&["--ids 5,17"]);
    ids("1,x").refused(&["`x` is not a token id"]);
    ids("").refused(&["an id is missing", "such as 5,17"]);
    ids(&["1"; 17].join(",")).refused(&["context is 16"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_place_that_cannot_be_written_is_refused_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("runs"), "a file in the way").unwrap();
    let done = phalanx(dir.path(), &[&["train"], SMALL]);
    done.refused(&["runs", "usual fix"]);
}

#[test]
fn an_export_never_replaces_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    let weights = dir.join("runs/a/model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    let export = ["export", "--run", "runs/a", "--out", "runs/a"];
    phalanx(dir, &[&export]).refused(&["is a run's folder", "another folder with --out"]);
    assert!(std::fs::read(&weights).unwrap() == before, "the run's weights were touched");
}

#[test]
fn output_that_a_full_disk_swallows_is_a_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let done = std::process::Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .arg("config")
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1));
    let told = String::from_utf8(done.stderr).unwrap();
    assert!(told.contains("cannot write standard output"), "{told}");
}

#[test]
fn a_model_that_cannot_fit_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let huge = ["train", "--preset", "tiny", "--set", "model.vocab=2147483647"];
    phalanx(dir.path(), &[&huge]).refused(&["this machine has", "usual fix"]);
}
