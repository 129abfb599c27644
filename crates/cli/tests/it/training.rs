//! `phalanx train`: what it prints, what it leaves, how it fails.

use std::fs;

use crate::command::{SMALL, phalanx, small_run};

const STEP_KEYS: [&str; 6] = ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms"];

#[test]
fn json_has_a_line_per_step_and_a_summary_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--json", "--set", "train.steps=4", "--set", "train.eval_every=2"];
    let done = phalanx(dir.path(), &[&["train"], SMALL, &settings]).ok();
    let lines = done.json();
    let steps: Vec<_> = lines.iter().filter(|l| l.get("step").is_some()).collect();
    assert_eq!(steps.len(), 4);
    for (i, step) in steps.iter().enumerate() {
        let object = step.as_object().unwrap();
        assert_eq!(object.len(), STEP_KEYS.len());
        assert!(STEP_KEYS.iter().all(|key| object[*key].is_number()), "{step}");
        assert_eq!(step["step"], i + 1);
    }
    let evaluations: Vec<_> = lines.iter().filter(|l| l["event"] == "eval").collect();
    assert_eq!(evaluations.len(), 2);
    assert!(evaluations.iter().all(|e| e.get("loss").is_none() && e["val_loss"].is_number()));
    let summary = &lines.last().unwrap()["summary"];
    assert_eq!(summary["steps"], 4);
    assert_eq!(summary["last_loss"], steps[3]["loss"]);
    assert!(done.err.contains("step 4/4"), "people read standard error: {}", done.err);
    // The folder tells the same.
    let run = dir.path().join(summary["run_dir"].as_str().unwrap());
    assert_eq!(fs::read_to_string(run.join("metrics.jsonl")).unwrap(), done.out);
}

#[test]
fn a_run_leaves_its_folder_and_can_be_repeated_from_it() {
    let dir = tempfile::tempdir().unwrap();
    small_run(dir.path());
    let run = dir.path().join("runs/a");
    for name in ["config.toml", "metrics.jsonl", "loss.svg", "model.safetensors"] {
        assert!(run.join(name).is_file(), "{name}");
    }
    assert!(fs::read_to_string(run.join("loss.svg")).unwrap().starts_with("<svg"));
    // The same configuration gives the same bits, in another folder.
    phalanx(dir.path(), &[&["train", "runs/a/config.toml"]]).ok();
    let again = dir.path().join("runs/a-2");
    let weights = |run: &std::path::Path| fs::read(run.join("model.safetensors")).unwrap();
    assert_eq!(weights(&run), weights(&again));
}

/// Small sizes that leave the default run its 8 ranks.
const EIGHT: &[&str] = &["--set", "train.seq_len=16", "--set", "train.batch_size=8"];

#[test]
fn the_default_run_repeats_its_first_steps_on_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let done = phalanx(dir, &[&["train", "--json", "--set", "train.steps=23"], EIGHT]).ok();
    let lines = done.json();
    let [.., event, summary] = lines.as_slice() else { panic!("{}", done.out) };
    assert_eq!((&event["event"], &event["steps"]), (&"one_rank".into(), &20.into()));
    assert!(event.get("step").is_none() && event.get("loss").is_none());
    let difference = event["loss_max_rel"].as_f64().unwrap();
    assert!((0.0..=1e-4).contains(&difference), "{difference}");
    assert!(summary.get("summary").is_some());
    assert_eq!(lines.iter().filter(|l| l.get("step").is_some()).count(), 23);
    for words in ["8 ranks, pp 2 · dp 2 · tp 2: ZeRO-3", "between ranks in each step: all_gather"]
    {
        assert!(done.err.contains(words), "`{words}` is not in: {}", done.err);
    }
    // Fewer steps than that are all repeated.
    let done = phalanx(dir, &[&["train", "--set", "train.steps=3"], EIGHT]).ok();
    assert!(done.out.contains("the first 3 steps once more, on one rank"), "{}", done.out);
    assert!(done.out.contains("one rank and all ranks agree to"), "{}", done.out);
}

#[test]
fn other_runs_are_not_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("c.toml"), "[train]\nsteps = 2\n").unwrap();
    for asked in [["c.toml"], ["--preset=default"], ["--set=parallel.dp=1"]] {
        let steps = ["--json", "--set", "train.steps=2"];
        let done = phalanx(dir, &[&["train"], &asked, &steps, EIGHT]).ok();
        assert!(!done.out.contains("one_rank"), "{asked:?}: {}", done.out);
    }
}

#[test]
fn people_see_what_is_trained_how_it_goes_and_what_comes_next() {
    let dir = tempfile::tempdir().unwrap();
    let done = phalanx(dir.path(), &[&["train"], SMALL, &["--set", "train.steps=12"]]).ok();
    for words in [
        "llama of 1 layer, ",
        "parameters",
        "Markov",
        "plan ",
        "step 10/12",
        "tok/s",
        "GFLOP/s",
        "held-out loss",
        "entropy",
        "model.safetensors",
        "phalanx export",
    ] {
        assert!(done.out.contains(words), "`{words}` is not in: {}", done.out);
    }
    assert!(!done.out.contains('\x1b'), "no colours away from a terminal");
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_and_leaves_no_weights() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--json", "--set", "optim.lr=1e30", "--set", "run.name=a"];
    let done = phalanx(dir.path(), &[&["train"], SMALL, &settings]);
    assert_eq!(done.code, 1, "{}", done.err);
    assert!(done.err.contains("at step 2"), "{}", done.err);
    assert!(done.err.contains("the last good loss was"), "{}", done.err);
    assert!(done.err.contains("usual fix"), "{}", done.err);
    assert!(done.json().iter().all(|line| line["loss"].is_number()));
    assert!(!dir.path().join("runs/a/model.safetensors").exists());
}

#[test]
fn a_remedy_that_is_already_on_is_not_proposed() {
    let dir = tempfile::tempdir().unwrap();
    let diverge = |more: &[&str]| {
        phalanx(dir.path(), &[&["train", "--set", "optim.lr=1e30"], SMALL, more]).err
    };
    let clipped = diverge(&[]);
    assert!(clipped.contains("a lower learning rate") && !clipped.contains("clip"), "{clipped}");
    assert!(!clipped.contains("f32"), "{clipped}");
    let narrow = diverge(&["--set", "optim.clip=none", "--set", "precision.compute=bf16"]);
    assert!(narrow.contains("optim.clip = 1.0") && narrow.contains("compute in f32"), "{narrow}");
}

/// A step contains its products, so these can never take more than all of it.
#[test]
fn the_share_of_the_gemm_rate_is_a_share() {
    let dir = tempfile::tempdir().unwrap();
    let done = phalanx(dir.path(), &[&["train", "--json", "--set", "train.steps=9"], SMALL]).ok();
    let summary = &done.json().pop().unwrap()["summary"];
    let share = summary["gemm_rate_fraction"].as_f64().unwrap();
    assert!(share > 0.0 && share <= 1.0, "{share}");
}

#[test]
fn any_text_can_be_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(40);
    fs::write(dir.path().join("fox.txt"), text).unwrap();
    fs::write(
        dir.path().join("fox.toml"),
        "[model]\nlayers = 1\nwidth = 16\nheads = 2\n[data]\nkind = \"text\"\npath = \"fox.txt\"\n\
         [train]\nsteps = 30\nbatch_size = 8\nseq_len = 16\n[optim]\nlr = 0.01\n",
    )
    .unwrap();
    let done = phalanx(dir.path(), &[&["train", "fox.toml", "--json"]]).ok();
    let summary = &done.json().pop().unwrap()["summary"];
    let loss = |key: &str| summary[key].as_f64().unwrap();
    assert!(loss("last_loss") < 0.7 * loss("first_loss"), "{summary}");
    assert!(summary.get("entropy_floor").is_none());
}

/// The load of experts is counted over all ranks, layers and micro-batches, wherever tokens are.
#[test]
fn the_load_of_experts_is_told_in_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    let own = ["model.experts=4", "model.layers=2", "precision.compute=f64", "train.steps=2"];
    let loads = |name: &str, sets: &[&str]| -> Vec<[f64; 2]> {
        let name = format!("run.name={name}");
        let sets = own.iter().chain(sets).copied().chain([name.as_str()]);
        let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
        let lines = phalanx(dir.path(), &[&["train", "--json"], SMALL, &sets]).ok().json();
        let steps = lines.iter().filter(|line| line.get("step").is_some());
        steps.map(|s| ["max_over_mean", "dropped"].map(|k| s["moe"][k].as_f64().unwrap())).collect()
    };
    let alone = loads("one", &["train.microbatches=2"]);
    assert!(alone.iter().all(|[most, lost]| *most > 1.0 && *lost > 0.0), "{alone:?}");
    for (name, sets) in [
        ("ep", &["parallel.dp=2", "parallel.ep=2", "run.checkpoint_every=1"][..]),
        ("tp", &["parallel.tp=2", "parallel.sp=true", "train.recompute=full"]),
        ("cp", &["parallel.cp=2", "parallel.cp_kind=ring"]),
        ("pp", &["parallel.pp=2", "parallel.schedule=chimera"]),
    ] {
        assert_eq!(loads(name, &[sets, &["train.microbatches=2"]].concat()), alone, "{sets:?}");
    }
    assert_eq!(loads("dropless", &["model.capacity=0"])[0][1], 0.0);
    let run = dir.path().join("runs");
    let picture = fs::read_to_string(run.join("ep/experts.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("steps 1 to 2"), "{picture}");
}
