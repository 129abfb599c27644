//! Checkpoints, and runs that go on from them: in any layout, and after any end.

use std::collections::BTreeMap;
use std::fs;
use std::io::BufRead;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::chaos::Dice;
use crate::command::{Done, SMALL, first_step, phalanx, under};

/// Loss and gradient norm of each step, by its number.
pub(crate) fn steps(done: &Done) -> BTreeMap<u64, (f64, f64)> {
    // A step that overflows has no norm.
    let number = |line: &Value, key: &str| line[key].as_f64().unwrap_or(-1.0);
    let lines = done.json();
    let steps = lines.iter().filter(|line| line.get("step").is_some());
    let step = |line: &Value| {
        (line["step"].as_u64().unwrap(), (number(line, "loss"), number(line, "grad_norm")))
    };
    steps.map(step).collect()
}

/// A small run with these settings, as `name`.
pub(crate) fn run(dir: &Path, name: &str, steps: usize, sets: &[&str]) -> Done {
    let more = [
        format!("run.name={name}"),
        format!("train.steps={steps}"),
        "model.layers=2".to_owned(),
        "train.microbatches=2".to_owned(),
        // So that the learning rate does not depend on the number of steps.
        "optim.schedule=constant".to_owned(),
        "optim.warmup_steps=0".to_owned(),
    ];
    let more = more.iter().map(String::as_str).chain(sets.iter().copied());
    let more: Vec<&str> = more.flat_map(|set| ["--set", set]).collect();
    phalanx(dir, &[&["train", "--json"], SMALL, &more]).ok()
}

pub(crate) fn go_on(dir: &Path, from: &str, sets: &[&str]) -> Done {
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    phalanx(dir, &[&["train", "--json", "--resume", from], &sets])
}

fn weights(dir: &Path, run: &str) -> Vec<u8> {
    let bytes = fs::read(dir.join("runs").join(run).join("model.safetensors")).unwrap();
    assert!(bytes.len() > 1000);
    bytes
}

const LAYOUTS: [&[&str]; 17] = [
    &[],
    &["parallel.dp=2"],
    &["parallel.dp=2", "parallel.zero=1", "precision.compute=bf16", "precision.weights=bf16"],
    &["parallel.dp=2", "parallel.zero=3"],
    &[
        "parallel.tp=2",
        "model.kv_heads=2",
        "parallel.sp=true",
        "optim.kind=sgd",
        "optim.momentum=0.9",
    ],
    &["parallel.cp=2", "model.kv_heads=2", "model.tied=true"],
    &["parallel.pp=2", "parallel.schedule=zb-h1", "model.tied=true"],
    &[
        "parallel.pp=2",
        "parallel.dp=2",
        "parallel.zero=2",
        "parallel.schedule=breadth-first",
        "model.layers=4",
    ],
    // Twice around, with ticks on zeros.
    &["parallel.pp=2", "parallel.schedule=vectorised", "parallel.chunks=2", "model.layers=4"],
    // The checkpoint after step 3 holds replicas that differ.
    &[
        "parallel.dp=2",
        "parallel.tp=2",
        "model.kv_heads=2",
        "parallel.sync=local-sgd",
        "parallel.sync_every=2",
    ],
    // The first steps overflow.
    &[
        "precision.compute=f16",
        "precision.weights=f16",
        "precision.initial_scale_power=27",
        "precision.loss_scale_window=2",
        "parallel.dp=2",
    ],
    &["optim.kind=lamb", "parallel.dp=2", "parallel.zero=2"],
    // Older versions of the weights are kept too.
    &["parallel.pp=2", "parallel.schedule=pipedream"],
    &["parallel.pp=2", "parallel.schedule=pipedream-2bw", "parallel.dp=2"],
    // One rank alone has the optimizer's state.
    &["parallel.dp=2", "parallel.sync=dataparallel", "precision.weights=bf16"],
    // Ranks have different experts.
    &["parallel.dp=4", "parallel.ep=2", "parallel.zero=1", "model.experts=4"],
    // Which are distributed to them.
    &[
        "parallel.dp=4",
        "parallel.ep=2",
        "parallel.zero=1",
        "model.experts=4",
        "parallel.expert_placement=round-robin",
        "optim.kind=adafactor",
    ],
];

#[test]
fn the_same_layout_goes_on_with_the_same_bits() {
    LAYOUTS.into_iter().for_each(goes_on_with_the_same_bits);
}

/// A run of seven steps, one that goes on after four, and one that goes on from a checkpoint beside its third.
pub(crate) fn goes_on_with_the_same_bits(sets: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let whole = steps(&run(dir, "whole", 7, sets));
    let saving = [sets, &["run.checkpoint_every=3", "run.keep=9"]].concat();
    run(dir, "a", 4, &saving);
    let rest = go_on(dir, "runs/a", &["train.steps=7"]).ok();
    assert_eq!(rest.json()[0], serde_json::json!({"event": "resumed", "at_step": 4}));
    let after: BTreeMap<_, _> = whole.clone().into_iter().filter(|(s, _)| *s > 4).collect();
    assert_eq!(steps(&rest), after, "{sets:?}");
    assert!(weights(dir, "a") == weights(dir, "whole"), "{sets:?}");
    // A checkpoint of before, in a folder of its own: what was saved beside a step.
    let earlier = "runs/a/checkpoints/step-00000003";
    let other = go_on(dir, earlier, &["train.steps=7", "run.name=b"]).ok();
    let after: BTreeMap<_, _> = whole.into_iter().filter(|(s, _)| *s > 3).collect();
    assert_eq!(steps(&other), after, "{sets:?}");
    assert!(weights(dir, "b") == weights(dir, "whole"), "{sets:?}");
    // The folder reads as if the run had never ended.
    let metrics = fs::read_to_string(dir.join("runs/a/metrics.jsonl")).unwrap();
    let lines = metrics.lines().filter(|line| line.starts_with("{\"step\":"));
    assert_eq!(lines.count(), 7);
}

/// Steps that ranks take together, between steps that are saved: those that go ahead of their norms in blocks of eight, clipped
/// or not, and those of a pipeline without a flush in rows of any length.
#[test]
fn steps_that_are_taken_together_go_on_with_the_same_bits() {
    let ahead = ["parallel.pp=2", "parallel.schedule=zb-h2", "parallel.post_validation=true"];
    let rolling = ["parallel.pp=2", "parallel.schedule=pipedream", "parallel.vertical_sync=true"];
    for sets in [[&ahead[..], &["optim.clip=1e6"]].concat(), ahead.to_vec(), rolling.to_vec()] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let whole = steps(&run(dir, "whole", 20, &sets));
        run(dir, "a", 9, &[&sets[..], &["run.checkpoint_every=9"]].concat());
        let rest = go_on(dir, "runs/a", &["train.steps=20"]).ok();
        let after: BTreeMap<_, _> = whole.into_iter().filter(|(step, _)| *step > 9).collect();
        assert_eq!(steps(&rest), after, "{sets:?}");
        assert!(weights(dir, "a") == weights(dir, "whole"), "{sets:?}");
    }
}

/// 20 pairs of layouts, in f64, beside a run that was never stopped.
#[test]
fn another_layout_goes_on_with_the_same_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let layouts: [&[&str]; 6] = [
        &["parallel.dp=2", "parallel.zero=3"],
        &["parallel.tp=2"],
        &["parallel.pp=2", "parallel.schedule=1f1b"],
        &["parallel.pp=2", "parallel.schedule=vectorised"],
        &["parallel.cp=2", "parallel.dp=2", "parallel.zero=1"],
        &[],
    ];
    let base = ["precision.compute=f64", "model.kv_heads=2"];
    let none =
        ["parallel.dp=1", "parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "parallel.zero=0"];
    let whole = steps(&run(dir, "whole", 6, &base));
    for (number, from) in layouts.iter().enumerate() {
        let name = format!("run{number}");
        run(dir, &name, 3, &[&base, *from, &["run.checkpoint_every=3"]].concat());
        for into in layouts.iter().filter(|into| *into != from) {
            let sets = [&none[..], into, &["train.steps=6", "run.name=other"]].concat();
            let rest = steps(&go_on(dir, &format!("runs/{name}"), &sets).ok());
            assert_eq!(rest.len(), 3);
            for (step, (loss, norm)) in rest {
                let (a, b) = whole[&step];
                let near = |a: f64, b: f64| (a - b).abs() <= 1e-10 * a.abs();
                assert!(near(a, loss) && near(b, norm), "{from:?} to {into:?}: {step} {a} {loss}");
            }
        }
    }
}

/// Layouts whose steps have the same bits: one rank and every schedule of a pipeline, or replicas that sum
/// gradients alike, as threads or processes.
fn families() -> [Vec<String>; 3] {
    let schedules = ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "v-half"];
    let pipeline = |more: &str| {
        let of = |schedule: &&str| format!("parallel.pp=2 parallel.schedule={schedule}{more}");
        schedules.iter().map(of).collect::<Vec<_>>()
    };
    let replicas = |zero: usize| {
        let more = format!(" parallel.dp=2 parallel.zero={zero}");
        [vec![more.trim().to_owned(), format!("run.ranks=processes{more}")], pipeline(&more)]
    };
    let summed_at_the_end = [replicas(0), replicas(1)].concat().concat();
    let [sharded, _] = replicas(2);
    let [gathered, _] = replicas(3);
    [[vec![String::new()], pipeline("")].concat(), summed_at_the_end, [sharded, gathered].concat()]
}

/// 20 pairs of layouts, drawn by a seed, beside a run that was never stopped: bit by bit.
#[test]
fn a_layout_with_the_same_bits_goes_on_with_them() {
    // Ranks that hold other parts of the gradient sum its norm in another order, so nothing is clipped.
    const BASE: &[&str] =
        &["model.layers=4", "train.microbatches=4", "run.checkpoint_every=3", "optim.clip=none"];
    const NONE: &[&str] =
        &["parallel.dp=1", "parallel.pp=1", "parallel.zero=0", "run.ranks=threads"];
    let mut dice = Dice(26);
    for (family, pairs) in families().into_iter().zip([8, 8, 4]) {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let with = |base: &'static [&'static str], layout: usize| {
            [base, &family[layout].split_whitespace().collect::<Vec<_>>()].concat()
        };
        let losses = |done: &Done| {
            let steps = steps(done).into_iter().filter(|(step, _)| *step > 3);
            steps.map(|(step, (loss, _))| (step, loss)).collect::<Vec<_>>()
        };
        let after = losses(&run(dir, "whole", 5, &with(BASE, 0)));
        for pair in 0..pairs {
            let [from, into] = [(); 2].map(|()| dice.roll(family.len()));
            let name = format!("pair{pair}");
            run(dir, &name, 3, &with(BASE, from));
            let going = [&with(NONE, into)[..], &["train.steps=5"]].concat();
            let rest = losses(&go_on(dir, &format!("runs/{name}"), &going).ok());
            let pair = format!("{:?} to {:?}", family[from], family[into]);
            assert_eq!(rest, after, "{pair}");
            assert!(weights(dir, &name) == weights(dir, "whole"), "{pair}");
        }
    }
}

/// Experts are saved by their global numbers.
#[test]
fn experts_go_on_on_other_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = ["precision.compute=f64", "model.experts=4", "train.batch_size=8"];
    let block = "parallel.expert_placement=block";
    let layouts: [&[&str]; 4] = [
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_placement=round-robin"],
        &["parallel.dp=1", "parallel.ep=1", "parallel.zero=0", block],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=3", block],
        &["parallel.dp=4", "parallel.ep=4", "parallel.zero=1", block],
    ];
    let whole = steps(&run(dir, "whole", 4, &base));
    for (number, from) in layouts.iter().enumerate() {
        let name = format!("run{number}");
        run(dir, &name, 2, &[&base, *from, &["run.checkpoint_every=2"]].concat());
        for into in layouts.iter().filter(|into| *into != from) {
            let sets = [*into, &["train.steps=4", "run.name=other"]].concat();
            let rest = steps(&go_on(dir, &format!("runs/{name}"), &sets).ok());
            assert_eq!(rest.len(), 2);
            for (step, (loss, norm)) in rest {
                let (a, b) = whole[&step];
                let near = |a: f64, b: f64| (a - b).abs() <= 1e-10 * a.abs();
                assert!(near(a, loss) && near(b, norm), "{from:?} to {into:?}: {step} {a} {loss}");
            }
        }
    }
}

/// Killed at any moment, a run has a whole checkpoint, and ends with the bits of a run that was not
/// disturbed.
#[test]
fn a_killed_run_goes_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let sets = ["parallel.dp=2", "parallel.zero=1", "run.checkpoint_every=1", "run.keep=2"];
    run(dir, "whole", 250, &sets[..2]);
    let all = ["model.layers=2", "train.microbatches=2", "train.steps=250", "run.name=a"];
    let constant = ["optim.schedule=constant", "optim.warmup_steps=0"];
    let all = sets.iter().chain(&all).chain(&constant);
    let all: Vec<&str> = all.flat_map(|set| ["--set", *set]).collect();
    let mut last = 0;
    for kill in 0..6 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.current_dir(dir).args(["train", "--json"]);
        match kill {
            0 => command.args(SMALL).args(&all),
            _ => command.args(["--resume", "runs/a"]),
        };
        let (mut child, mut out) = match kill {
            0 => first_step(&mut command),
            _ => {
                let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
                let out = child.stdout.take().unwrap();
                (child, std::io::BufReader::new(out))
            }
        };
        // Some moments of starting, and some after a few steps, however fast they are: the last step is far away.
        match kill % 2 {
            1 => std::thread::sleep(Duration::from_millis(30 * kill)),
            _ => (0..5 + 3 * kill).for_each(|_| {
                out.read_line(&mut String::new()).unwrap();
            }),
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let shown = phalanx(dir, &[&["checkpoint", "check", "runs/a", "--json"]]);
        if kill == 0 && shown.code == 2 {
            continue;
        }
        assert_eq!(shown.ok().json()[0]["ok"], true);
        let shown = phalanx(dir, &[&["checkpoint", "show", "runs/a", "--json"]]).ok();
        let step = shown.json()[0]["step"].as_u64().unwrap();
        assert!(step >= last, "{step} after {last}");
        last = step;
    }
    assert!(last > 0, "no run was killed after its first checkpoint");
    go_on(dir, "runs/a", &[]).ok();
    assert!(weights(dir, "a") == weights(dir, "whole"), "other bits after {last} steps");
}

/// A run that was stopped after its last checkpoint, but before its weights were written.
#[test]
fn a_run_that_lacks_only_its_weights_writes_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, "a", 3, &["run.checkpoint_every=3"]);
    let refused = go_on(dir, "runs/a", &[]);
    assert!(refused.err.contains("nothing left to train"), "{}", refused.err);
    let whole = weights(dir, "a");
    fs::remove_file(dir.join("runs/a/model.safetensors")).unwrap();
    let rest = go_on(dir, "runs/a", &[]).ok();
    assert_eq!(steps(&rest).len(), 0);
    assert!(!rest.err.contains("NaN") && !rest.out.contains("null"), "{} {}", rest.err, rest.out);
    assert!(weights(dir, "a") == whole);
    assert!(go_on(dir, "runs/a", &[]).err.contains("nothing left to train"));
}

/// What torchrun and Slurm do after a failure: they start the same command again, and say how often.
#[test]
fn a_job_that_is_started_again_goes_on_from_its_newest_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let torch = [("TORCHELASTIC_RUN_ID", "a"), ("MASTER_ADDR", "b"), ("MASTER_PORT", "7")];
    for (number, (job, count)) in [
        (&torch[..], "TORCHELASTIC_RESTART_COUNT"),
        (&[("SLURM_JOB_ID", "77")][..], "SLURM_RESTART_COUNT"),
    ]
    .into_iter()
    .enumerate()
    {
        let start = |before: &str, steps: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
            command.current_dir(dir).args(["train", "--json"]).args(SMALL);
            let name = format!("run.name=job{number}");
            for set in [steps, "run.checkpoint_every=2", "optim.schedule=constant", &name] {
                command.args(["--set", set]);
            }
            let output = command.envs(job.iter().copied()).env(count, before).output().unwrap();
            let err = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{err}");
            (String::from_utf8(output.stdout).unwrap(), err)
        };
        // The name is taken, so the run gets another one.
        let folder = |after: &str| dir.join(format!("runs/job{number}{after}"));
        fs::create_dir_all(folder("")).unwrap();
        let (first, _) = start("0", "train.steps=4");
        assert!(first.starts_with("{\"step\":1,"), "{first}");
        let (again, err) = start("1", "train.steps=6");
        assert!(again.starts_with("{\"event\":\"resumed\",\"at_step\":4}"), "{again}");
        assert!(err.contains("was started again: runs/job"), "{err}");
        assert!(folder("-2").is_dir() && !folder("-3").exists());
        // Another job has another run, although it was started again, too.
        let other = phalanx(dir, &[&["train", "--json"], SMALL, &["--set", "train.steps=1"]]).ok();
        assert!(other.out.starts_with("{\"step\":1,"), "{}", other.out);
    }
}

#[test]
fn a_run_goes_on_in_its_own_folder_whatever_that_is_called_now() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, "a", 2, &["run.checkpoint_every=2"]);
    fs::rename(dir.join("runs/a"), dir.join("runs/best")).unwrap();
    go_on(dir, "runs/best", &["train.steps=4"]).ok();
    assert_eq!(fs::read_dir(dir.join("runs")).unwrap().count(), 1);
    assert!(dir.join("runs/best/checkpoints/step-00000004").is_dir());
}

#[test]
fn what_cannot_go_on_is_refused_with_what_can() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    go_on(dir, "latest", &[]).refused(&["no run in runs", "run.checkpoint_every"]);
    go_on(dir, "runs/none", &[]).refused(&["there is no folder", "run.checkpoint_every"]);
    run(dir, "plain", 2, &[]);
    go_on(dir, "runs/plain", &[]).refused(&["has no checkpoints"]);
    run(dir, "a", 4, &["run.checkpoint_every=4"]);
    go_on(dir, "latest", &[]).refused(&["is after step 4, the last of 4", "train.steps=5"]);
    let sgd = ["optim.kind=sgd", "train.steps=5"];
    go_on(dir, "latest", &sgd).refused(&["exp_avg", "momentum_buffer", "optim.kind"]);
    let wider = ["model.width=32", "train.steps=5"];
    go_on(dir, "latest", &wider).refused(&["another model", "no model.* settings"]);
    let deeper = ["model.layers=3", "train.steps=5"];
    go_on(dir, "latest", &deeper).refused(&["has no parameter", "another model"]);
    fs::write(dir.join("runs/a/checkpoints/step-00000004/manifest.json"), "{").unwrap();
    go_on(dir, "runs/a", &["train.steps=5"]).refused(&["no whole checkpoint"]);
    go_on(dir, "runs/a/checkpoints/step-00000004", &[]).refused(&["cannot be parsed"]);
}

/// The file that says where runs are may be a pipe.
#[test]
fn the_latest_run_is_found_by_a_file_that_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, "a", 2, &["run.checkpoint_every=2", "run.dir=elsewhere"]);
    fs::write(dir.join("more.toml"), "[run]\ndir = \"elsewhere\"\n[train]\nsteps = 4\n").unwrap();
    let more = ["train", "--json", "-", "--resume", "latest"];
    let done = under(dir, "exec < <(cat more.toml)", &[&more]).ok();
    assert_eq!(steps(&done).into_keys().collect::<Vec<_>>(), [3, 4]);
}

#[test]
fn a_checkpoint_is_shown_and_converted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let sets = ["run.checkpoint_every=2", "parallel.tp=2", "parallel.dp=2", "parallel.zero=3"];
    run(dir, "a", 2, &[&sets[..], &["model.kv_heads=2"]].concat());
    let shown = phalanx(dir, &[&["checkpoint", "show", "runs/a"]]).ok();
    for word in ["step 2, 16 samples", "4 ranks", "exp_avg_sq", "in 4 files"] {
        assert!(shown.out.contains(word), "`{word}` is not in {}", shown.out);
    }
    phalanx(dir, &[&["checkpoint", "convert", "runs/a", "--out", "hf"]]).ok();
    let loss = |model: &str| {
        let ids = ["eval", "--model", model, "--ids", "1,2,3,4,5", "--json"];
        phalanx(dir, &[&ids]).ok().json()[0]["loss"].as_f64().unwrap()
    };
    assert_eq!(loss("hf:hf"), loss("run:runs/a"));
}
