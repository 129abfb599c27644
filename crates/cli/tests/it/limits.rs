//! Limits of the system and requests beyond them: refused or told, never an abort or a signal.

use std::fs;

use crate::command::{SMALL, phalanx, shell, small_run, under};

const SCHEDULE: &[&str] = &["schedule", "1f1b", "--stages", "40", "--microbatches", "400"];

/// Without its handling, the system ends the process with a signal and leaves a temporary file.
#[test]
fn a_file_that_may_not_grow_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let limit = "ulimit -f 4";
    let done = under(dir, limit, &[SCHEDULE, &["--svg", "a.svg"]]);
    assert_eq!((done.code, &*done.out), (1, ""), "{}", done.err);
    assert!(done.err.contains("a.svg") && done.err.contains("ulimit -f"), "{}", done.err);
    let settings = ["--set", "train.steps=2", "--set", "run.name=a"];
    let done = under(dir, "ulimit -f 7", &[&["train"], SMALL, &settings]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("model.safetensors"), "{}", done.err);
    let done = under(dir, "ulimit -f 4; exec > printed", &[&["config"]]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("cannot write standard output"), "{}", done.err);
    assert!(shell(dir, "test -z \"$(find . -name '*.tmp')\""), "a temporary file is left");
}

#[test]
fn help_that_a_full_disk_swallows_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["--help"][..], &["--version"], &["train", "--help"], &["help"], &["config"]] {
        let done = under(dir.path(), "exec > /dev/full", &[args]);
        assert_eq!(done.code, 1, "{args:?}");
        assert!(done.err.contains("cannot write standard output"), "{}", done.err);
        assert!(done.err.contains("usual fix"), "{}", done.err);
    }
}

#[test]
fn more_ranks_than_a_process_can_have_are_refused_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let many = |dp: usize, more: &[&str]| {
        let sets = [format!("parallel.dp={dp}"), format!("train.batch_size={dp}")];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        under(dir, "ulimit -v 4000000", &[&["train"], SMALL, &sets, more])
    };
    for dp in [1025, 40_000, 1_000_000] {
        let told = format!("{dp} ranks of 1 threads are too many");
        many(dp, &[]).refused(&[&told, "nearest that work: 1024 ranks"]);
    }
    many(16, &["--set", "run.threads=250"]).refused(&["nearest that work: 4 ranks"]);
    let verify = ["verify", "--set", "parallel.dp=2000", "--set", "train.batch_size=2000"];
    under(dir, "", &[&verify, SMALL, &verify[1..]]).refused(&["too many"]);
    let threads = ["train", "--set", "run.threads=300"];
    under(dir, "", &[&threads, SMALL, &threads[1..]]).refused(&["run.threads = 256"]);
    assert!(!dir.join("runs").exists(), "nothing was started");
}

/// Stacks of threads count as address space: at some limit they are what is refused. Whatever is, it is
/// told, and no process is aborted.
#[test]
fn too_little_address_space_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let two = ["--set", "parallel.dp=2", "--set", "train.steps=1"];
    let (mut refused, mut worked) = (0, 0);
    for kib in [60_000, 100_000, 150_000, 250_000, 400_000, 600_000] {
        let limit = format!("ulimit -v {kib}");
        let done = under(dir, &limit, &[&["train"], SMALL, &two]);
        match done.code {
            0 => worked += 1,
            1 | 2 => {
                refused += 1;
                let told = done.err.contains("error: ") && done.err.contains("usual fix");
                assert!(told || done.err.contains("nearest"), "{kib}: {}", done.err);
            }
            code => panic!("{kib}: code {code}: {}", done.err),
        }
        let collectives = under(dir, &limit, &[&["bench", "collectives", "--json"]]);
        assert!([0, 1, 2].contains(&collectives.code), "{kib}: {}", collectives.err);
    }
    assert!(refused > 0 && worked > 0, "{refused} and {worked}");
    let large = ["train", "--preset", "gpt2-124m"];
    under(dir, "ulimit -v 1500000", &[&large]).refused(&["this machine has", "ulimit -v"]);
    let default = under(dir, "ulimit -v 400000", &[&["train", "--set", "train.steps=1"]]);
    assert!([0, 1, 2].contains(&default.code), "{}: {}", default.code, default.err);
}

/// The limit does not hold for an administrator, who therefore becomes somebody else.
#[test]
fn threads_that_the_system_refuses_are_told_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    fs::copy(env!("CARGO_BIN_EXE_phalanx"), dir.join("phalanx")).unwrap();
    if !shell(dir, &format!("chmod 777 . && {nobody} ./phalanx --version >/dev/null 2>&1")) {
        return;
    }
    let mut refused = 0;
    for (ranks, threads) in [(4, 1), (1, 4)] {
        for limit in [1, 2, 3] {
            let sets = [format!("parallel.dp={ranks}"), format!("run.threads={threads}")];
            let more = ["--set", &sets[0], "--set", &sets[1], "--set", "train.steps=1"];
            let script = format!("ulimit -u {limit}; exec ./phalanx \"$@\"");
            let done = std::process::Command::new("setpriv")
                .current_dir(dir)
                .args(nobody.split_whitespace().skip(1))
                .args(["bash", "-c", &script, "phalanx", "train"])
                .args(SMALL)
                .args(more)
                .output()
                .unwrap();
            let err = String::from_utf8(done.stderr).unwrap();
            // Other processes of that user count too, so where the limit strikes is not known.
            assert!(matches!(done.status.code(), Some(0 | 2)), "{limit}: {err}");
            refused += usize::from(err.contains("ulimit -u"));
        }
    }
    assert!(refused > 0);
}

#[test]
fn a_plan_that_does_not_fit_starts_no_rank() {
    let dir = tempfile::tempdir().unwrap();
    let huge = ["train", "--preset", "tiny", "--set", "train.batch_size=16777216"];
    // Compiling it would touch 2 GiB.
    under(dir.path(), "ulimit -v 3000000", &[&huge]).refused(&["this machine has"]);
}

#[test]
fn too_few_open_files_are_told_with_a_remedy_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    let before = fs::read_dir(dir.join("runs")).unwrap().count();
    let (mut refused, mut never_started) = (0, 0);
    for files in 4..9 {
        // The shell needs a few of its own until `exec`.
        let limit = format!("ulimit -n {files}");
        let script = format!("{limit}; exec \"$0\" \"$@\"");
        let done = std::process::Command::new("bash")
            .current_dir(dir)
            .args(["-c", &script, env!("CARGO_BIN_EXE_phalanx"), "train"])
            .args(SMALL)
            .args(["--set", "train.steps=1", "--set", "run.name=b"])
            .output()
            .unwrap();
        let err = String::from_utf8(done.stderr).unwrap();
        match done.status.code() {
            Some(0) => continue,
            Some(2) if err.contains("Too many open files") => refused += 1,
            // Too few for the system's loader: the program never started.
            Some(127) if err.contains("loading shared libraries") => {
                never_started += 1;
                continue;
            }
            code => panic!("{files}: {code:?}: {err}"),
        }
        assert!(err.contains("ulimit -n"), "{err}");
    }
    assert!(refused > 0);
    let after = fs::read_dir(dir.join("runs")).unwrap().count();
    assert_eq!(after, before + 5 - refused - never_started, "a refused run left a folder");
}

#[test]
fn a_schedule_or_model_too_long_to_handle_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let layers = ["explain", "--preset", "tiny", "--set", "model.layers=100000"];
    under(dir, "", &[&layers]).refused(&["model.layers = 100000", "nearest that work"]);
    let wide = ["schedule", "1f1b", "--stages", "100000", "--microbatches", "1"];
    under(dir, "", &[&wide]).refused(&["100000", "--json"]);
    let lines = under(dir, "", &[&wide, &["--json"]]).ok().json();
    assert_eq!(lines[0]["stages"], 100_000);
    let padded = ["schedule", "zb-v", "--stages", "20000", "--microbatches", "4", "--json"];
    under(dir, "", &[&padded]).refused(&["zb-v"]);
}

#[test]
fn a_run_starts_from_the_weights_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_run(dir);
    let train = |more: &[&str]| phalanx(dir, &[&["train"], more]);
    // The first loss is that of the run's weights.
    let from = ["--set", "model.from=run:runs/a", "--set", "train.steps=1", "--json"];
    let same = ["--set", "train.batch_size=8", "--set", "data.seed=0"];
    let first = train(&[&from[..], &same].concat()).ok().json();
    let expected = phalanx(dir, &[&["eval", "--model", "run:runs/a", "--json"]]).ok().json();
    let loss = |lines: &[serde_json::Value]| lines[0]["loss"].as_f64().unwrap();
    assert!((loss(&first) - loss(&expected)).abs() < 0.1);
    train(&["--set", "model.from=run:gone"]).refused(&["gone does not exist (--set)"]);
    let wider = ["--set", "model.from=run:runs/a", "--set", "model.width=24"];
    train(&wider).refused(&["contradicts the model's 16"]);
    phalanx(dir, &[&["export", "--run", "runs/a", "--out", "hf"]]).ok();
    train(&["--set", "model.from=run:hf"]).refused(&["usual fix: model.from=hf:hf"]);
    train(&["--set", "model.from=hf:runs/a"]).refused(&["usual fix: model.from=run:runs/a"]);
}
